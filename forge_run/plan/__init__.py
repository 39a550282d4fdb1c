"""Plan a run (`--dry-run`): its work, its memory, its spending, and its least time."""
