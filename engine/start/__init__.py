"""The engine put together: the process, the phases of its start, and the loop that it runs then.

arrivals: what the API process asks for becomes requests in the queue
described: what of a model is quantised, what its experts run with
engine: what its ranks are together
faults: faults on purpose, so that tests can watch what becomes of them
loop: the engine loop
precompile: kernels compiled in parallel at a cold start, or before anybody waits for them, and their cache
process: the engine process, started by the API process as `python -m vserve.engine.start.process --fd N` (a socket
    pair)
rank: one rank, from a configuration to a runner that can step
rank_process: a rank's process, started by its engine's as `python -m vserve.engine.start.rank_process --fd N` (a
    socket pair)
warm_steps: steps that a start makes up, so that every kernel a request can meet has been compiled
"""
