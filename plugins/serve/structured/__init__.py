"""What a response must match, and the calls of tools in it."""
