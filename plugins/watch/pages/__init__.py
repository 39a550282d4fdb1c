"""Tell what pages of a run show, and write them into one file."""
