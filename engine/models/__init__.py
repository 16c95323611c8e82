"""What is computed for the layers of a model: decoders and encoders, assembled from layers.

attention_block: attention as most models have it, between its products
blocks: the decoder-only models that are served
conv_block: a short convolution, between its products
decoder_layer: what stands around mixer and MLP
delta_block: a gated delta net, between its products
packed: decoders whose attention goes both ways
encoder: encoders of the shape of BERT
model: what the engine asks of a model, and the hidden states that drafting heads read of it
latent_attention: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)
mlp: a layer's MLP, or the mixture of experts in its place
mixture_apart: a mixture of experts beside a dense MLP, each with norms of its own
scan_block: Mamba-2, between its products, and beside attention
state_block: what blocks have in common whose mixer keeps a recurrent state
token_vectors: what tokens have for each layer beside their embedding, and the ends of layers that take it in
"""
