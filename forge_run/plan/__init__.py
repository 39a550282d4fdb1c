"""The plan of a run (`--dry-run`): what it would do, hold in memory, spend, and at best take."""
