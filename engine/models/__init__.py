"""What is computed for the layers of a model: decoders and encoders, assembled from layers.

attention_block: attention as most models have it, between its products
blocks: the decoder-only models that are served
both_ways: decoders whose attention goes both ways, as embedding models are made of them
encoder: encoders of the shape of BERT
features: what a model thinks of each token of a step, kept for a head that drafts by it
latent_attention: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)
mixture: a mixture of experts in the place of a layer's MLP
mlp: the MLP between two products
model: what the engine asks of a model, whatever it is built from
packed: texts one behind the other, without padding, each of which attends to itself alone
"""
