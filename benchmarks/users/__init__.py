"""What a person waits for: answers of the command line, and pages of a run."""
