"""The drafting methods, one per file."""
