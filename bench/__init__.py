"""Measurements.

``python -m bench.report`` runs the suites (``test_*.py``, for pytest-benchmark) and shows what they measured in tables
and plots; ``pytest bench --shapes smoke`` tries them anywhere in a minute. ``bench.accumulation`` and ``bench.gemm``
are commands of their own. Data goes to ``bench/results/<gpu>/``.
"""
