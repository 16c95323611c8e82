"""Who computes how many tokens in which step, and which blocks they have. Without torch.

block_pool: blocks of the KV cache as plain integers
draft_depth: how many tokens of each request are drafted for a step
fair_queue: the requests that wait, and who of them is next
invariants: what must hold of the engine's books, checked at run time
kv_cache: which blocks of the KV cache belong to which request, and which prefixes the cache still holds
kv_events: what the prefix cache gains and loses, told to routers outside
kv_group: what requests keep of the KV cache in one KV group
kv_replays: batches of cache events once more, for who has missed some
pacing: when to launch the next step
planner: decides which request computes how many tokens in the next step, and who has to go back to the queue for
    that
prompt_results: what requests want of their prompts themselves, not of what follows them
request: a request, and what the engine knows of it while it lives
roster: the unfinished requests
scheduler: the unfinished requests from arrival to end
sharing: how prompts share a step where options say so
stage_turns: how a pipeline's plans share the work, so that every stage has some
step: a plan in the making, and what the scheduler must remember of it until its result is in
watch: what the engine does, step by step, for whoever watches
"""
