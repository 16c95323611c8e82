"""From logits to tokens: penalties, masks, thresholds, draws, drafts.

argmax: greedy sampling
masks: forbidden tokens: by a bit mask, and by words that an output must not contain
ngram: drafts by n-grams
noise: the noise of the draw
penalties: changes to the logits before sampling
sampling: drawing the next token
threshold: the lowest logit that top-k and top-p keep, found exactly and without sorting (Triton functions of
    sampling.py)
verify: which drafts hold
"""
