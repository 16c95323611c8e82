"""What `serve` and `LLM` may be told beside the engine's own options."""
