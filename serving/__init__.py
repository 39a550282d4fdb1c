"""The HTTP door in front of the generators: OpenAI's wire, cartridges and strategies by name."""
