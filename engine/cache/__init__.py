"""What lies on the device for requests: pages of keys and values, states, rows of tables, the inputs of a step.

batch: from a plan to device inputs
kv_layout: which layers share the blocks of the KV cache, what a block holds, and how many tokens fit
kv_format: how keys and values are kept
kv_storage: the memory of the KV cache
latent_prompts: which steps expand the latents of their prompts, and the workspace where they do
rows: stable rows
states: the memory of recurrent states
"""
