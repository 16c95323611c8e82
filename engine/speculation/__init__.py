"""Tokens that somebody drafts are verified several in a step. Answers stay what they are; only their speed changes.

draft_config: what a checkpoint that drafts is
draft_model: a smaller model with the target's tokens, which drafts by itself
drafter: who drafts
heads: heads of EAGLE
loading: from what --speculative-config names to who drafts
model_drafter: drafts by a model or a head
mtp: the layer behind a model's last one that drafts
scratch: where keys and values of drafts of drafts go
synthetic: acceptance that is imposed, for measuring what so many right drafts would bring
"""
