# Every target works in a fresh clone: it makes the environment if it is missing or older than the project's files.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test nightly docs notebooks versions reports lint format clean
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed  ## train the smallest model in bf16 and with two recipes
	$(BIN)/tritonfp8 train --model tiny --recipes bf16,rowwise,blockwise --steps 20

test: $(VENV)/.installed
	$(BIN)/pytest

nightly: $(VENV)/.installed  ## run every case of every test, plant every fault, and compile with every supported triton
	env -u CI $(BIN)/pytest
	$(BIN)/python tests/support/faults/mutants.py --jobs 2
	$(BIN)/python tests/support/kernels/every_triton.py

docs: $(VENV)/.installed  ## build the site of the pages: build/site/index.html
	$(BIN)/sphinx-build -W --keep-going -q -c docs . build/site

notebooks: $(VENV)/.installed  ## run the notebooks and write their outputs back
	$(BIN)/python -m notebooks.run

versions: $(VENV)/.installed  ## compile the kernels with every supported triton
	$(BIN)/python tests/support/kernels/every_triton.py

reports: $(VENV)/.installed  ## compile the kernels and write the reports that the tests read
	PYTHONPATH=tests/support/kernels:tests/support/choice $(BIN)/python tests/support/kernels/write_reports.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tritons build dist docs/api *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
