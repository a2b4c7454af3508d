"""The benchmark suites, one a subject, run by pytest-benchmark."""
