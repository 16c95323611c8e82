"""Models of transformers, served with vserve's cache, attention, products and loader.

build: a model of transformers without weights, and what it calls in place of its attention and experts
config: what the engine has to know of a model of transformers
files: a checkpoint's tensors under the names, and in the form, that transformers' modules have them
model: a decoder of transformers as the engine wants models, and what attention has on each rank
modules: what takes the place of modules in a model of transformers, and how its plan divides them over ranks
probe: one forward on meta, to see what a model of transformers does; which of its norms are RMS norms
"""
