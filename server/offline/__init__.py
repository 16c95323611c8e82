"""The class LLM and what goes with it."""
