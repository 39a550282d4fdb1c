"""Make and verify answers: strategies, and documents that verify."""
