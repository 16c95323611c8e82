"""Recurrent states of rows, in slots beside the cache's blocks.

delta_net: gated delta nets with the convolution before them: decodes, prompts in chunks of 64, snapshots
gated_norm: RMSNorm over each head, times a gate
short_conv: the short causal convolution, and the ring that keeps its inputs
slots: states copied from slot to slot
step: what a step does to the states of its rows
"""
