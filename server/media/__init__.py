"""Pictures of requests: where they are from, what is fetched, how they are decoded, and the tokens that stand for them."""
