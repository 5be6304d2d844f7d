# Every target starts from nothing but python3 and pip: the first call makes .venv, later calls start at once.
# A stamp file named after the hash of pyproject.toml and constraints.txt says what is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CORE := $(VENV)/.core-$(PINS)
DEV := $(VENV)/.dev-$(PINS)
DEEPSPEED := $(VENV)/.deepspeed-$(PINS)

.PHONY: help install install-dev demo test test-unit test-ray test-slow test-gpu test-deepspeed lint format bench clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(CORE)  ## make .venv with what training needs
install-dev: $(DEV)  ## add Ray and the tools that tests and lint need

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@rm -f $(VENV)/.core-* && touch $@

$(DEV): $(CORE)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[ray,lora,data,dev]'
	@rm -f $(VENV)/.dev-* && touch $@

$(DEEPSPEED): $(DEV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[deepspeed]'
	@rm -f $(VENV)/.deepspeed-* && touch $@

demo: $(CORE)  ## watch a tiny model learn, on this machine, in about a minute
	$(BIN)/python examples/grpo_minimal.py

test: test-unit test-ray  ## all tests of the README's promise

test-unit: $(DEV)  ## everything that needs no Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not ray and not slow and not deepspeed and not gpu'

test-ray: $(DEV)  ## the same clusters on a real Ray
	$(BIN)/python -m pytest -m 'ray and not slow and not deepspeed'

test-slow: $(DEV)  ## the long grids
	$(BIN)/python -m pytest -m 'slow and not deepspeed'

test-gpu: $(DEV)  ## on one NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

test-deepspeed: $(DEEPSPEED)  ## ZeRO 1 to 3 on this machine's CPU
	$(BIN)/python -m pytest -m deepspeed

lint: $(DEV)  ## style, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none

format: $(DEV)  ## rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)  ## print the tables of benchmarks/
	$(BIN)/python benchmarks/protocol.py
	$(BIN)/python benchmarks/algorithms.py
	$(BIN)/python benchmarks/log_probs.py

clean:  ## remove what make made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis output
