"""Low-rank adapters: many fine-tunes on one base model.

adapter: an adapter in a folder
book: which adapters there are, which of them are in the host's memory and which in a slot of the device
experts_places: where a checkpoint has the matrices of a mixture's experts
experts_slots: experts' matrices in a slot
layout: where an adapter's matrices lie in a slot
loading: what the engine's loop does about adapters
merged: a checkpoint with one adapter merged into it, tensor by tensor as it is read
patterns: regular expressions of an adapter's configuration, matched by a process of its own
peft_config: adapter_config.json of PEFT's LoRA
store: adapters in the host's memory, packed as a slot of the device holds them
tables: the slots on the device, and what adds an adapter's share to the products of a step
weights_file: adapter_model.safetensors, which somebody may replace, or cut short, while it is read or later
"""
