"""Tokens that somebody drafts are verified several in a step. Answers stay what they are; only their speed changes."""
