"""Ranks that share one model: how they talk to each other, and which numbers of them can."""
