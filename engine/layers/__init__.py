"""The layers that models are assembled from.

attention: attention over the paged KV cache, and sinks
delta: a gated delta net over its state
embedding: token ids → vectors, and vectors → logits
routing: the router of a mixture, and the counts of tokens by expert
experts: the experts of a mixture
head: products behind the pooled hidden state, in fp32 whatever the model's type
linear: the only place that multiplies by weights
packed: texts, or pictures, one behind the other, each of which attends to itself alone
norm: norms, alone or fused with the residual addition before them
picture_tokens: tokens of a step that pictures stand for
rope: rotary position embedding (Su et al., arXiv:2104.09864) and the ways to stretch it, as transformers computes
    them
"""
