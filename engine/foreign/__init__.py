"""Models of transformers, served with vserve's cache, attention, products and loader.

build: a model of transformers as its config describes it, without weights
config: what the engine has to know of a model of transformers
files: a checkpoint's tensors under the names, and in the form, that transformers' modules have them
hooks: what transformers' models call in place of their own attention and mixtures of experts
model: a decoder of transformers as the engine wants models
modules: what takes the place of modules in a model of transformers
norms: which norms of a model of transformers are RMS norms
probe: one forward of a few tokens without numbers (on meta), to see what a model of transformers does
rank_specs: what attention has on each rank of a model of transformers that its own plan divides
shards: a model of transformers divided over ranks by its own plan (`base_model_tp_plan` of its config)
"""
