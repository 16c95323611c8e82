"""The weights of a checkpoint into the modules of a model.

dummy_weights: random weights, for a model whose files are not there (--load-format dummy)
loader: from a model's folder to a model on its device
matching: a model without weights and the headers of a checkpoint held against each other
"""
