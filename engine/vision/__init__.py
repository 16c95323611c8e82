"""Pictures: what a model's tower is, how pictures become what it reads, and where their tokens are.

positions: where the tokens of a prompt with pictures are, in time, height and width
"""
