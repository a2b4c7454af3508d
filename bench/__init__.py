"""Measurements.

``python -m bench.report`` runs the suites and writes tables and plots. ``pytest bench --shapes smoke`` runs them in a
minute on any machine. Separate commands: ``python -m bench.accumulation``, those of
:mod:`bench.training`, and, on several GPUs, ``torchrun -m
bench.distributed`` and ``torchrun -m bench.distributed.trainer``. Data goes to ``bench/results/<gpu>/``.
"""
