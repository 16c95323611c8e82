"""What an engine will take and how long its steps will be, before anything is taken; also for cards that are not here.

card: GPUs in numbers
cpu_memory: what rows and steps take of a machine's memory where the model runs on the CPU
divisions: over how many cards an engine is best divided, and how many engines hold a load
draft_size: what the weights of who drafts will take in memory
encoder_limits: how much of whole texts a step computes, and what that takes in memory
fit: costs of a step that follow those of a server which runs
host_memory: the machine's memory, or what a container may use of it
load: what an engine, or several alike, would make of a load
memory: memory is planned before it is taken
settings: what the engine runs with
setup: one engine on cards that are not here
shape: what one rank has of a model, in numbers of a token or of a step
shortage: memory that was not enough at the start, in one line
simulation: the real scheduler under a virtual clock
step_model: how long a card is likely to take for a step
weight_size: what weights will take in memory, known from headers
"""
