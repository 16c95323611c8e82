"""The files of a model: config.json, and tensors by name, whatever their format.

checkpoint: the weights of a model's folder, in safetensors, GGUF or pickled by torch
gguf_checkpoint: a GGUF file as a checkpoint
gguf_config: what the keys of a GGUF file say of its model, as a config.json would say it
gguf_families: which of llama.cpp's architectures are read
gguf_file: a GGUF file read by its header: metadata, tensors, and the keys of its architecture
model_file: a model's config.json as it lies in its folder, read without torch
prefetch: reads a checkpoint's files into the page cache while torch is still being imported
"""
