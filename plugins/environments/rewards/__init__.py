"""Judge finished episodes: a user's functions, verifiers, and the sum of their values."""
