"""A model as its files and the options describe it, and over how many ranks it can be divided.

choice: who computes a model
divide: over how many ranks a model can be divided, known from config.json alone
foreign_layout: what a probe of transformers' model finds
gain: what more ranks, or more stages, would bring to the cache
hub_gguf: a model of the hub that is a GGUF file
model_config: what a checkpoint's config.json says of its model, with transformers' defaults for what it leaves out
model_source: where a model's files come from
overrides: a model's config.json as the options change it
reading: a model as its config.json and the options describe it, with transformers' defaults for what is left out
stages: which layers the stages of a pipeline have, known from config.json alone
"""
