# Every target sets itself up: a fresh checkout needs Python 3.11 or newer, make, and the network for the first run.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint sweep serve-venv serve-test clean

PYTHON ?= python3
VENV := .venv
SERVE_VENV := .venv-serve
SGLANG := .cache/sglang
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' requirements/dev.txt)
# gloo ranks share the cores: more threads than one a rank only makes them wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

help:
	@echo "make demo        train, save, reload and complete with a small MoE on two CPU processes"
	@echo "make test        everything that needs no GPU, the serving tests included"
	@echo "make lint        ruff and mypy"
	@echo "make sweep       rebuild the table of model types in docs/"
	@echo "make serve-test  only the serving tests (vLLM on CPU, in a venv of its own)"
	@echo "make clean       remove what these targets made"

setup: $(VENV)/.stamp
serve-venv: $(SERVE_VENV)/.stamp $(SGLANG)/.stamp

# torch first and by its exact version: where a CPU build is offered it is the one to take, and nothing later pulls
# another one in.
$(VENV)/.stamp: pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c requirements/dev.txt $(TORCH)
	$(BIN)/python -m pip install -q -c requirements/dev.txt -e '.[dev,peft]'
	touch $@

# vLLM fixes its own torch and transformers, so it lives apart.
$(SERVE_VENV)/.stamp: requirements/serve.txt
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/python -m pip install -q $(TORCH)
	$(SERVE_VENV)/bin/python -m pip install -q --no-deps -r requirements/serve.txt
	touch $@

# SGLang has no CPU wheel: the tests read its weight loader out of the wheel file without installing it.
$(SGLANG)/.stamp: requirements/sglang.txt
	rm -rf $(SGLANG)
	mkdir -p $(SGLANG)
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 \
	    --platform manylinux_2_34_x86_64 -d $(SGLANG) -r requirements/sglang.txt
	touch $@

demo: $(VENV)/.stamp
	rm -rf demo_output
	$(BIN)/python examples/demo/prepare.py demo_output
	$(BIN)/torchrun --standalone --nproc_per_node 2 examples/trainer/after.py \
	    demo_output/start demo_output/text.txt demo_output/trained --steps 400 --batch 4 --length 128
	$(BIN)/python examples/demo/complete.py demo_output

# A serving venv that can't be built must not hide the other tests: the serving tests then fail and say why.
test: $(VENV)/.stamp
	$(MAKE) serve-venv || echo "make serve-venv failed: the serving tests will fail" >&2
	$(BIN)/python -m pytest

serve-test: $(VENV)/.stamp serve-venv
	$(BIN)/python -m pytest tests/serving

lint: $(VENV)/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

sweep: $(VENV)/.stamp
	$(BIN)/python -m tests.distributed.sweep

clean:
	rm -rf $(VENV) $(SERVE_VENV) .cache demo_output
