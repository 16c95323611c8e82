"""Attention over the paged cache, and what writes it: rotation, keys and values, codes of 8 bits.

attention: attention over the paged KV cache
attention_beside: decode and prefill attention of a step at the same time, on a Hopper GPU
attention_decode: decode attention over the paged KV cache
attention_decode_fp8: decode attention over a cache of 8-bit codes (kv_fp8.py)
attention_parts: what the kernels of attention share: arguments, functions on the device, splits of a context
attention_prefill: prefill attention over the paged KV cache in Triton
attention_prefill_gluon: the Gluon kernel behind attention_prefill_hopper.py
attention_prefill_hopper: prefill attention on Hopper GPUs
history: where the tokens of requests are on the device
kv_fp8: keys and values of 8 bits
kv_unpack: cached keys and values of 8 bits, unpacked for the kernel that reads pages by TMA
latent_kv: latent attention's step before attention, in one launch
latent_prompts: prompts of latent attention, expanded
prefill_work: the work table of a prefill step
rope: rotary position embedding
rope_kv: rotate queries and keys and write keys and values into the paged cache, in one launch
"""
