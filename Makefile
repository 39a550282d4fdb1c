# `make` lists the targets. Everything runs in .venv; a second call installs nothing again.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_OPTIONS ?=

.DEFAULT_GOAL := help
.PHONY: help install run test test-fast lint format bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with the pinned dependencies and the console scripts

# Debian may lack the venv module's ensurepip; virtualenv, fetched beside the tree, does without.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(VENV); }

# torchstore 0.1.2 pins a torch that nothing else here can use: installed last, without its
# dependencies (docs/adr/0002-tensor-plane.md).
$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) torch==2.13.0
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) -e '.[dev]'
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) --no-deps torchstore==0.1.2
	@touch $@

run: install ## the main job: train cartridges on policy, a few minutes on a laptop
	$(BIN)/forge-run meshes/longhealth.yaml

test: install ## the whole test suite
	$(BIN)/python -m pytest

test-fast: install ## the tests that spawn no process, under a minute
	$(BIN)/python -m pytest -m 'not mesh and not run'

lint: install ## ruff, types and the layers contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy protocols learning clinic actors services forge_run
	$(BIN)/lint-imports

format: install ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## measure the tensor planes against memcpy
	$(BIN)/python -m benchmarks.tensor_plane

clean: ## remove the environment and every run
	rm -rf $(VENV) .bootstrap runs
