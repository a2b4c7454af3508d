"""The benchmark suites, one for each subject, run by pytest-benchmark."""
