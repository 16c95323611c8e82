"""Structured output: what clients ask for, as grammars, and the process that compiles them."""
