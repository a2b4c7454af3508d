"""Fixtures of the tests that compile kernels."""

import pytest
from compile_target import compile_launch, note_launches


@pytest.fixture
def compiled(monkeypatch):
    """What a call would launch on a device of compute capability ``cc``, compiled: kernels and reports."""

    def compile_(cc, call, *modules, **abilities):
        found = note_launches(monkeypatch, cc, *modules, **abilities)
        call()
        return [(kernel, compile_launch(cc, kernel, *arguments, **options)) for kernel, arguments, options in found]

    return compile_
