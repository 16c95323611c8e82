"""Pictures of requests: where they come from, how they are fetched and decoded, and the tokens that stand for them."""
