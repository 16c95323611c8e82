"""The engine put together: the process, the phases of its start, and the loop that it runs then.

arrivals: what the API process asks for becomes requests in the queue
described: what of a model is quantised, how, and what multiplies by it
engine: what its ranks are together
expert_info: what a mixture's experts run with
faults: faults on purpose, so that tests can watch what becomes of them
kernel_cache: where compiled kernels are kept, so that a card's are compiled once
loop: the engine loop
make_adapters: the slots of a runner, as the options want them
precompile: compiles kernels in parallel at a cold start
process: the engine process, started by the API process as `python -m vserve.engine.start.process --fd N` (a socket
    pair)
rank: one rank, from a configuration to a runner that can step
rank_process: a rank's process, started by its engine's as `python -m vserve.engine.start.rank_process --fd N` (a
    socket pair)
warm: kernels compiled before anybody waits for them
warm_steps: steps that a start makes up, so that every kernel a request can meet has been compiled
"""
