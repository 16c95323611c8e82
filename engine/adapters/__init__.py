"""Low-rank adapters: many fine-tunes on one base model.

adapter: an adapter in a folder
book: which adapters there are, which of them are in the host's memory and which in a slot of the device
experts: an adapter's matrices of experts: where a checkpoint has them, and where a slot does
layout: an adapter's memory: one flat piece for all layers, as a slot of the device and the host's store hold it
loading: what the engine's loop does about adapters
merged: a checkpoint with one adapter merged into it, tensor by tensor as it is read
patterns: regular expressions of an adapter's configuration, matched by a process of its own
peft_files: the two files of PEFT's LoRA: adapter_config.json and adapter_model.safetensors
tables: the slots on the device, and what adds an adapter's share to the products of a step
"""
