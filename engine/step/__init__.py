"""One step on the device: plan to inputs, the model, sampled tokens, the result.

compilations: kernels that are compiled after the engine is ready
device_cache: what the layers of a rank cache
dummy_plan: a step that nobody asked for
encoder_runner: steps of whole texts
executor: runs plans and delivers their results on the event loop
graphs: CUDA graphs of whole steps, from gathering the inputs to the last hidden state, one a padded shape
mask: what the grammars of a step's requests allow
mask_threads: threads that make masks, and how long a step may wait for them
pending: a step on its way from the device
pooling: embeddings, classes and scores
prompt_logprobs: log-probabilities of prompt tokens
relay: what a stage of a pipeline has beside its layers
runner: the runner owns the device
sampled: what becomes of sampled tokens
sampler: from logits to tokens, on the device
"""
