# Every target works in a fresh clone: it makes the environment if it is missing or older than the project's files.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test nightly docs notebooks versions reports lint format clean
.PHONY: eight eight-fsdp eight-bits eight-tp eight-styles eight-experts eight-tp-experts eight-tests eight-check
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

# `make -k eight PYTHON=python` in an environment that has torch for the GPUs. Each part is a command of its own.
eight: eight-fsdp eight-bits eight-tp eight-styles eight-experts eight-tp-experts eight-tests eight-check
TITAN = $(PYTHON) -m bench.distributed.torchtitan --model 8b --processes 8
ON_EIGHT = $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 8 -m
SLICE = $(ON_EIGHT) bench.distributed --model 8b-slice --recipes rowwise --steps 20 --batch-size 4 --seq-len 4096
MIXTURE = $(ON_EIGHT) bench.distributed.experts --layers 24 --recipes rowwise --steps 50 --ep 4 --compile

eight-fsdp:
	$(TITAN) --steps 60 --contenders 'bf16,torchao tensorwise,torchao rowwise,rowwise,tensorwise,blockwise'

eight-bits:
	$(TITAN) --steps 20 --losses --layouts fsdp,wide --contenders rowwise,tensorwise,blockwise

eight-tp:
	$(TITAN) --steps 30 --layouts tp,tp8 --contenders 'bf16,torchao rowwise,rowwise'

eight-styles:
	$(SLICE) --mesh 4,2
	$(SLICE) --mesh 1,8

eight-experts:
	$(MIXTURE)
	$(MIXTURE) --gather

eight-tp-experts:
	$(MIXTURE) --tp 2

eight-tests:
	$(PYTHON) -m pytest -m multigpu tests

eight-check:
	$(PYTHON) -m bench.scale --check

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .tritons build dist docs/api *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
