"""Bytes, sockets and middleware: what a server knows before it knows what is asked of it."""
