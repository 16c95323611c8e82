"""Recurrent states of rows, in slots beside the cache's blocks.

delta_chunk: what a chunk of a prompt gives without the state before it
delta_decode: delta nets of rows that decode, in one kernel
delta_net: gated delta nets with the convolution before them: decodes, prompts in chunks of 64, snapshots
delta_parts: what the kernels of states share on the device
delta_pass: the pass of states over chunks
gated_conv: a short convolution between two gates, as a layer of its own
gated_norm: RMSNorm over each head, times a gate
group_norm: RMSNorm over groups of channels with a gate, or the gate alone
scan: Mamba-2 with the convolution before it: decodes, prompts in chunks of 64, snapshots
scan_decode: Mamba-2 of rows that decode, in one kernel
scan_pass: the pass of Mamba-2's states over the chunks of prompts
short_conv: the short causal convolution, and the ring that keeps its inputs
slots: states copied from slot to slot
step: what a step does to the states of its rows
"""
