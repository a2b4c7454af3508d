# Every target works on a fresh clone: the environment is made from the project's files when it is missing or older.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test versions lint format clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed  ## bf16 against two recipes on the smallest model
	$(BIN)/tritonfp8 train --model tiny --recipes bf16,rowwise,blockwise --steps 20

test: $(VENV)/.installed
	$(BIN)/pytest

versions: $(VENV)/.installed  ## kernels compiled by every triton that is supported
	$(BIN)/python tests/support/every_triton.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tritons build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
