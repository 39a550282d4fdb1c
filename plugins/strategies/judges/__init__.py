"""Judges of steps for the scorer process_reward: a reward model, or a model over an API."""
