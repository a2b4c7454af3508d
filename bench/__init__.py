"""Measurements.

``python -m bench.report`` runs the suites and shows what they measured in tables and plots; ``pytest bench --shapes
smoke`` tries them anywhere in a minute. ``python -m bench.accumulation`` and ``torchrun -m bench.distributed``, which
runs on several GPUs, are commands of their own. Data goes to ``bench/results/<gpu>/``.
"""
