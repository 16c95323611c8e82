"""One file a model family: what it reads of config.json. What is computed stands in blocks.py."""
