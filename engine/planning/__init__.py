"""What an engine will take and how long its steps will be, before anything is taken; also for cards that are not here.

card: GPUs in numbers
drafts: which drafts an engine makes, of those that --speculative-config asks for
host_memory: the machine's memory, and what helps where it was not enough
load: what engines would make of a load, and how many cards hold it
machine: the machine that an engine runs on, as settings go by it
memory: memory is planned before it is taken, on a card, on the CPU, and of an encoder
settings: what the engine runs with
setup: one engine on cards that are not here
shape: what one rank has of a model, in numbers of a token or of a step
simulation: the real scheduler under a virtual clock
state_slots: how the memory of a cache is divided between blocks and recurrent states
step_model: how long a card is likely to take for a step, by its numbers or fitted to measured ones
step_sizes: how many tokens and requests a step has at most, where nobody has said so
weight_size: what weights will take in memory, those of a drafting model too, known from headers
"""
