PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --durations=15
PROMPT ?= The President shall

BIN := $(VENV)/bin

.PHONY: demo test lint types unit gpu-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	$(BIN)/wmtp generate "$(PROMPT)" --max-new-tokens 128 --temperature 0.8 --top-p 0.95 --seed 1
	$(BIN)/wmtp generate "$(PROMPT)" --max-new-tokens 128 --compare

test: lint types unit

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-installed
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis

unit: $(VENV)/.test-installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Needs a GPU of compute capability 9.0 and jax with CUDA in the environment: `make gpu-check VENV=...`.
gpu-check:
	$(BIN)/python -m wmtp_jax.bench.gpu_check --out build/gpu-check

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/.demo-installed
