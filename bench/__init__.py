"""Measurements.

``python -m bench.report`` runs the suites (``test_*.py``, for pytest-benchmark) and shows what they measured in tables
and plots; ``pytest bench --shapes smoke`` tries them anywhere in a minute. ``bench.accumulation``
and ``bench.distributed``, which runs on several GPUs, are commands of their own. Data goes to ``bench/results/<gpu>/``.
"""
