"""Drafting methods, one a file."""
