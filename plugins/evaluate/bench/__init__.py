"""Compare ways to compress a document on equal terms: `forge bench`."""
