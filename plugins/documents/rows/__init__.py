"""Read a user's datasets: JSON lines, Parquet, the hub's, and functions that give rows."""
