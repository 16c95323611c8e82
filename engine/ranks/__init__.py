"""Several ranks under one engine: a process for each, the plans they are sent, and what becomes of one that is lost."""
