"""Low-rank adapters: many fine-tunes on one base model."""
