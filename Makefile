# `make serve` and `make test` are all that is needed: both create the environment they run in.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PYTHON312 ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
# Further requirements for pip, for example PINS='jax==0.11.2'.
PINS ?=
ARGS ?=
# Test files run beside each other; each file stays in one process, which keeps its compiled programs.
WORKERS ?= 2

comma := ,
GPU := $(if $(shell command -v nvidia-smi),$(comma)gpu)

.PHONY: help serve test check format test-gpu test-312 clean

help:  ## say what can be made
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.serve  ## start the server on the bundled model; ARGS='--port 8123' passes flags on
	$(BIN)/python -m dspark_jax.serving.serve $(ARGS)

test: check  ## run everything that must pass; ARGS='-k budget' goes to pytest
	$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(VENV)/.test  ## lint, formatting, import contracts and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(VENV)/.test  ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-gpu: $(VENV)/.test  ## the tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu $(ARGS)

test-312:  ## the tests on the other supported pair, Python 3.12 and JAX 0.11
	@$(PYTHON312) -c '' || { echo 'error: no Python 3.12: make test-312 PYTHON312=/path/to/python3.12' >&2; exit 1; }
	$(MAKE) VENV=.venv-312 PYTHON=$(PYTHON312) PINS=jax==0.11.2 .venv-312/.test
	.venv-312/bin/pytest -n $(WORKERS) --dist loadfile $(ARGS)

clean:  ## remove environments and caches
	rm -rf .venv .venv-312 build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Each stamp stands for an installation of what pyproject.toml asks for. pip is left to its usual index; of its
# chatter a line per package is shown.
$(VENV)/.serve: EXTRAS := $(if $(GPU),[gpu])
$(VENV)/.test: EXTRAS := [test$(GPU)]

$(VENV)/.serve $(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo 'installing dspark_jax$(EXTRAS) into $(VENV) (minutes the first time)'
	@$(BIN)/pip install --disable-pip-version-check -e '.$(EXTRAS)' $(PINS) \
		| awk '/^Collecting/ { print "  " $$2 } / Downloading .* MB\)/ { print "   ", $$(NF - 1), $$NF } { fflush() }'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
