"""The files of a model: config.json, and tensors by name, whatever their format.

checkpoint: the weights of a model's folder, whatever their files
gguf_checkpoint: a GGUF file as a checkpoint
gguf_config: what the keys of a GGUF file say of its model, as a config.json would say it
gguf_families: which of llama.cpp's architectures are read
gguf_file: a GGUF file (versions 2 and 3, little endian) read by its header
gguf_keys: the keys that a GGUF file has for the model's architecture, checked as they are read
model_file: a model's config.json as it lies in its folder, read without torch
pickled: weight files that torch pickled (*.bin, *.pt)
prefetch: reads a checkpoint's files into the page cache while torch is still being imported
safetensors_files: weight files in safetensors format
tensor_info: a tensor of a checkpoint, known by its file's header alone
"""
