"""Quantised weights: how checkpoints store them, what they mean, and the products with them."""
