"""Who computes how many tokens in which step, and which blocks they have. Without torch.

block_pool: blocks of the KV cache as plain integers
encoder_cache: which features of pictures the device keeps, which of them a step computes, and how far prompts may go
    without
fair_queue: who waits, and who of them is next
kv_cache: which blocks of the KV cache belong to which request, and which prefixes the cache still holds
kv_events: what the prefix cache gains and loses, told to routers outside, once more to who has missed some
kv_group: which blocks a request keeps for some of the layers, and what of a prefix those need to find again
pacing: when to launch the next step
planner: decides which request computes how many tokens in the next step, and who has to go back to the queue for
    that
prompt_results: what requests want of their prompts themselves, not of what follows them
request: a request, and what the engine knows of it while it lives
roster: the unfinished requests: which wait, and which run, on which row
scheduler: the unfinished requests from arrival to end
sharing: how steps are shared by prompts, by the stages of a pipeline, and between drafts and tokens
state_group: the slots of recurrent state: which request has which, and which snapshots of states are still there
step: a plan in the making, and what the scheduler must remember of it until its result is in
watch: what the engine does, step by step, for whoever watches
"""
