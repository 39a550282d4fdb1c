"""What a test does with each block of the pages (`table.yaml`)."""
