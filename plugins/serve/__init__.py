"""Serve a model over HTTP in OpenAI's API, with cartridges and strategies selected by name."""
