"""Text and tokens: tokenizer, chat template, detokenizer, and what a model folder says of them."""
