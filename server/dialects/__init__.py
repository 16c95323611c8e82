"""Other APIs than OpenAI's chat: each turns its request into one for a chat, and what is said into its own events."""
