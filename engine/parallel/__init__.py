"""Ranks that share one model: how they find each other and talk.

group: the ranks that share one model, as its layers see them
join: how the ranks that share a model find each other, and where they meet
pipeline: stages of a model that is cut between layers, and how they reach each other
symmetric: ranks whose cards reach each other's memory
"""
