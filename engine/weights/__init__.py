"""The weights of a checkpoint into the modules of a model.

loader: from a model's folder, or random numbers (--load-format dummy), to a model on its device
matching: a model without weights and the headers of a checkpoint held against each other
"""
