"""The way to the engine: its process or thread, what it says of each request, and who notices when it is silent."""
