"""Ranks that share one model: how they find each other and talk.

group: the ranks that share one model, as its layers see them
join: how the ranks that share a model find each other, and what they talk through then
pipeline: stages of a model that is cut between layers, and how they reach each other
rendezvous: where the ranks of a group meet
symmetric: ranks whose cards reach each other's memory
"""
