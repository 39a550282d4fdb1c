"""Accuracy of cartridges trained in one process, and what can be extracted from them."""
