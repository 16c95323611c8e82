"""A model as its files and the options describe it, and over how many ranks it can be divided.

model_config: a model as its config.json describes it, and what computes it: a family of vserve's or transformers' class
divide: how a model can be divided over ranks and stages, and what more of them would bring
download: files of the hub, downloaded or found in its cache, and how far that is
model_source: a model's files: a folder, the hub's, or one GGUF file of a repository
overrides: a model's config.json as the options change it
picture_files: what a model's folder says of pictures beside config.json
torchvision: one that was built for another torch is kept from transformers
reading: a model as its config.json and the options describe it, with transformers' defaults for what is left out
"""
