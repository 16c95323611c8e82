"""Models of transformers, served with vserve's cache, attention, products and loader."""
