"""Models that read whole texts both ways and write none: vectors, classes and scores without a KV cache."""
