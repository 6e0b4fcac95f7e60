# Everything a developer or a newcomer runs. `make demo` and `make test` need Python 3.11 and a C compiler.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ONCE ?= 0
# Tests that share nothing run side by side; those with a Ray cluster one after the other.
SHORT := not long and not gpu

.PHONY: help install check test test-long demo bench proto clean

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

install: $(STAMP)  ## Make .venv and install Latentmesh into it.

check: install  ## Static checks: format, lint, imports, types, sizes, spelling.
	BIN=$(BIN) tools/lint.sh

test: check  ## Everything that must pass everywhere (no GPU).
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "$(SHORT) and not ray" tests $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q -m "$(SHORT) and ray" tests $(PYTEST_ARGS)

test-long: install  ## The long seeds and the start/stop cycles.
	$(BIN)/python -m pytest -q -m "long" --timeout 3600 $(PYTEST_ARGS)

demo: install  ## A cluster on a small checkpoint, three prompts at once. ONCE=1 ends it afterwards.
	@$(BIN)/latentmesh demo $(if $(filter 1,$(ONCE)),--once,)

bench: install  ## Micro-benchmarks; results under benchmarks/results.
	$(BIN)/python -m benchmarks.dispatch_roundtrip

proto: install  ## Regenerate the Python code of proto/.
	PYTHON=$(BIN)/python tools/generate_proto.sh

clean:  ## Remove the environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
