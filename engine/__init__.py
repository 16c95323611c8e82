"""Tokens: scheduling, cache blocks, model, sampling. No text, no HTTP."""
