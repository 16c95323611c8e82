"""Drafted tokens are verified several in a step. Answers stay what they are; only their speed changes.

draft_config: what a checkpoint that drafts is
networks: the networks that draft: heads of EAGLE, MTP layers, a smaller model
drafter: what every drafter does, acceptance that is imposed, and pages for keys of what is only drafted
loading: from what --speculative-config names to the drafter
model_drafter: drafts by a model or a head
"""
