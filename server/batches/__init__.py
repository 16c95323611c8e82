"""Files, and batches of the requests that they hold.

`asking.py`: a line of a batch is asked of the application itself · `files.py`: files in memory, of bounded number, size
and age, each its owner's alone · `batch.py`: one batch from its first line to its last · `batches.py`: all of them.
"""
