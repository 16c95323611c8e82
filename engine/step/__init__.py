"""One step on the device: plan to inputs, the model, sampled tokens, the result.

compilations: steps that nobody asked for, and kernels that are compiled too late all the same
device_cache: what the layers of a rank cache
encoder_runner: steps of whole texts
executor: runs plans and delivers their results on the event loop
graph_table: the padded shapes that steps are captured for, and which of them holds a step
graphs: CUDA graphs of whole steps, from gathering the inputs to the last hidden state, one a padded shape
mask: what the grammars of a step's requests allow, and the threads that make masks
prompt_results: log-probabilities of prompt tokens; embeddings, classes and scores
relay: what a stage of a pipeline has beside its layers
runner: the runner owns the device
sampled: what becomes of sampled tokens, on the device and on their way to the host
sampler: from logits to tokens, on the device
seeing: what a step with pictures has beside others: features, where they go, positions that have three axes
"""
