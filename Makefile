# Every target starts from nothing but python3 and pip: the first call makes .venv, later calls start at once.
# A stamp file named after the hash of pyproject.toml and constraints.txt says what is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
CORE := $(VENV)/.core-$(PINS)
DEV := $(VENV)/.dev-$(PINS)
DEEPSPEED := $(VENV)/.deepspeed-$(PINS)
VLLM := $(VENV)/.vllm-$(PINS)
DOCS := $(VENV)/.docs-$(PINS)
BENCH := $(VENV)/.bench-$(PINS)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: help install install-dev demo test test-unit test-ray test-slow test-portable test-gpu test-deepspeed test-vllm test-browser docs lint format bench clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(CORE)  ## make .venv with what training needs
install-dev: $(DEV)  ## add Ray and the tools that tests and lint need

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): | $(BIN)/python
	$(PIP) -e '.[report,envs]'
	@rm -f $(VENV)/.core-* && touch $@

$(DEV): $(CORE)
	$(PIP) -e '.[ray,lora,data,rewards,envs,tracking,report,dev]'
	@rm -f $(VENV)/.dev-* && touch $@

$(DEEPSPEED): $(DEV)
	DS_BUILD_OPS=0 $(PIP) -e '.[deepspeed]'
	@rm -f $(VENV)/.deepspeed-* && touch $@

# vLLM asks for torchvision and others, whose builds need CUDA and break model loading on a CPU.
$(VLLM): $(DEV)
	$(PIP) -e '.[vllm]'
	$(BIN)/python -m pip uninstall -y -q torchvision torchaudio torchcodec
	@rm -f $(VENV)/.vllm-* && touch $@

$(DOCS): $(DEV)
	$(PIP) -e '.[docs]'
	@rm -f $(VENV)/.docs-* && touch $@

$(BENCH): $(DEV)
	$(PIP) -e '.[bench]'
	@rm -f $(VENV)/.bench-* && touch $@

demo: $(CORE)  ## watch a tiny model learn, on this machine, in about a minute (roll demo)
	$(BIN)/roll demo

test: test-unit test-ray  ## all tests of the README's promise

test-unit: $(DEV)  ## everything that needs no Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not ray and not slow and not deepspeed and not gpu and not vllm and not browser'

test-ray: $(DEV)  ## the same clusters on a real Ray
	$(BIN)/python -m pytest -m 'ray and not slow and not deepspeed and not vllm'

test-slow: $(DEV)  ## the long grids
	$(BIN)/python -m pytest -m 'slow and not deepspeed and not vllm'

# Last bits of sums differ between processors. These settings give torch and MKL the code of others; where a setting
# does not name the number of threads it is one, because two test processes share the machine; threads that wait do not spin.
test-portable: $(DEV)  ## what is sensitive to arithmetic, under the arithmetic of other processors
	@set -e; for setting in ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 OMP_NUM_THREADS=2; do \
		echo "== $$setting"; \
		env OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $$setting $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'portable and not ray and not slow and not deepspeed and not gpu and not vllm and not browser'; \
	done

test-gpu: $(DEV)  ## on one NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

test-deepspeed: $(DEEPSPEED)  ## ZeRO 1 to 3 on this machine's CPU
	$(BIN)/python -m pytest -m deepspeed

test-vllm: $(VLLM)  ## generation with a real vLLM on this machine's CPU
	$(BIN)/python -m pytest -m vllm

test-browser: $(DEV)  ## the run report in a real Chromium
	@command -v chromium chromium-browser google-chrome >/dev/null || (apt-get update -q && apt-get install -y -q chromium)
	$(BIN)/python -m pytest -m browser

docs: $(DOCS)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

lint: $(DEV)  ## style, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none

format: $(DEV)  ## rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH)  ## print the tables of benchmarks/
	$(BIN)/python benchmarks/protocol.py
	$(BIN)/python benchmarks/algorithms.py
	$(BIN)/python benchmarks/log_probs.py
	$(BIN)/python benchmarks/dpo_vs_trl.py

clean:  ## remove what make made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis output site
