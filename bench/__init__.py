"""Measurements: ``README.md`` has a command for each question. ``pytest bench`` tries the suites without a GPU."""
