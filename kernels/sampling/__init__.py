"""From logits to tokens: penalties, masks, thresholds, draws, drafts.

argmax: greedy sampling
bad_words: forbidden words
ngram: drafts by n-grams
noise: the noise of the draw
penalties: changes to the logits before sampling
sampling: drawing the next token
threshold: the lowest logit that top-k and top-p keep, found exactly and without sorting (Triton functions of
    sampling.py)
token_mask: forbidding tokens by a bit mask, which is how grammars say what may come next
verify: which drafts hold
"""
