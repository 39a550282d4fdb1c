"""What a person waits for: the command line, pages of a run, vLLM's server with our plugin."""
