"""What requests and answers look like in JSON."""
