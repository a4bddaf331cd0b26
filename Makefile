# Everything runs in a virtual environment that is made on the way, and made anew when pyproject.toml changes.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
# A second environment that has all of the first, torchao and bitsandbytes
APART := $(abspath $(VENV))/quantized
# The first Python here that is new enough; another one: make setup PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# torch comes first, so that nothing else chooses its build: any recent one for a GPU, the CPU build elsewhere.
# Where PyPI's torch is the CUDA build: make setup TORCH_CPU_INDEX='--index-url https://download.pytorch.org/whl/cpu'
TORCH_GPU ?= torch>=2.11
TORCH_CPU ?= torch==2.13.0
TORCH_CPU_INDEX ?=
HAS_GPU = $(shell nvidia-smi -L 2>/dev/null | grep -m 1 GPU)
TORCH = $(if $(HAS_GPU),'$(TORCH_GPU)','$(TORCH_CPU)' $(TORCH_CPU_INDEX))
WORKERS ?= 2
GPUS ?= 4
# More for the run: make train-prototype ARGS='budget.tokens=1_000_000 --new'
ARGS ?=
# A folder of transformers' repository at the installed version: make test-upstream CHECKOUT=...
CHECKOUT ?=

export PATH := $(BIN):$(PATH)
# Two tests at a time on two cores: one thread each; what is compiled of cpt is kept for the processes that tests start. What DeepSpeed compiles belongs to the environment that compiled it.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --durations 10
QUICK := 'not heavy and not slow and not long and not quantized and not cluster and not gpu and not network'
CORE := --ignore=tests/contrib
SPHINX := $(BIN)/python -m sphinx -c docs --fail-on-warning --keep-going --quiet

.PHONY: help setup demo test test-contrib test-quick coverage mutations test-slow test-long test-quantized test-cluster test-oldest test-newest test-upstream matrix test-gpu test-network lint format check docs notebooks docs-links bench-data bench-peers bench-plan bench-gpu bench-packing bench-step bench-guards bench-documents bench-verdict bench-importing bench-saving bench-replay bench-optimizers train-prototype train-production

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make the virtual environment

demo: $(INSTALLED) ## pre-train a small model, continue on a domain, show what it learned: offline, on the CPU, in minutes
	$(BIN)/cpt demo $(ARGS)

test: $(INSTALLED) ## the test suite: no network, no GPU, 8 minutes on 2 cores beside other work
	$(PYTEST) -n $(WORKERS) --dist worksteal $(CORE) $(ARGS)

test-contrib: $(INSTALLED) ## the tests of the optional parts, slow ones too
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not long and not quantized and not cluster and not gpu and not network' $(or $(ARGS),tests/contrib)

test-quick: $(INSTALLED) ## what starts no process and trains nothing: about a minute, for each save
	$(PYTEST) -n $(WORKERS) --dist worksteal -m $(QUICK) $(ARGS)

test-slow: $(INSTALLED) ## long runs and smaller grids
	$(PYTEST) -n $(WORKERS) --dist worksteal $(CORE) -m 'slow and not long and not quantized and not cluster and not gpu and not network' $(ARGS)

test-long: $(INSTALLED) ## grids of stages, ways to run and faults: hours
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'long and not quantized and not cluster' $(ARGS)

test-quantized: $(APART)/.installed ## what needs torchao or bitsandbytes, kept apart: with them every process that imports transformers starts seconds later
	$(subst $(BIN)/python,$(APART)/bin/python,$(PYTEST)) -m 'quantized$(if $(HAS_GPU),, and not gpu)' $(ARGS)

$(APART)/.installed: $(INSTALLED)
	$(BIN)/python -m venv --clear $(APART)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" > \
		"$$($(APART)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	$(APART)/bin/python -m pip install --quiet --no-deps 'torchao>=0.18' 'bitsandbytes>=0.48'
	sed '1s|.*|#!$(APART)/bin/python|' $(BIN)/cpt > $(APART)/bin/cpt
	chmod +x $(APART)/bin/cpt
	touch $@

test-cluster: $(INSTALLED) ## two hosts on this machine, as root
	$(PYTEST) tests/launch -m cluster $(ARGS)

test-gpu: $(INSTALLED) ## the tests that need a CUDA GPU
	$(PYTEST) -m 'gpu and not quantized' $(ARGS) || $(call unless_there_are_none,gpu)

test-network: $(INSTALLED) ## the tests that need the Hugging Face Hub or the package index
	HF_HUB_OFFLINE=0 $(BIN)/python -m pytest -m network $(ARGS) || $(call unless_there_are_none,network)

coverage: $(INSTALLED) ## which lines of cpt/ the default and the slow tests run, in the processes that they start too: an hour on 2 cores
	rm -rf build/coverage
	$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) -n $(WORKERS) --dist worksteal -m 'not long and not quantized and not cluster and not gpu and not network' -k 'not compiled_once' $(ARGS) # torch compiles nothing while lines are counted
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

mutations: $(INSTALLED) ## break lines of cpt/ that SEED=7 draws and check that a test notices: an hour on 2 cores, continues where it stopped; without SEED the lines of benchmarks/mutations/lines.yaml
	$(BIN)/python -m benchmarks.mutations -j $(WORKERS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# The environment is made once: remove its folder for another try, or newer versions.
test-oldest: OTHER_TORCH = 'torch==2.11.*' $(TORCH_CPU_INDEX)
test-oldest: OTHER_STACK = 'transformers==5.17.*'
test-oldest: build/oldest/.installed ## tests/internals and the quick tests of models, training and optim with the oldest torch and transformers that pyproject.toml allows: by hand
	$(call test_other_stack,oldest)

# torch is the CUDA build, 5 GB, which also runs without a GPU. Where pip's own constraints keep torch back: PIP_CONSTRAINT=EMPTY_FILE
test-newest: OTHER_TORCH = 'torch==2.15.*'
test-newest: OTHER_STACK = --upgrade --upgrade-strategy eager 'torch==2.15.*'
test-newest: build/newest/.installed ## the same with the newest versions of everything that pyproject.toml allows: by hand
	$(call test_other_stack,newest)

build/%/.installed: pyproject.toml $(INSTALLED)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet $(OTHER_TORCH)
	$(@D)/bin/python -m pip install --quiet $(OTHER_STACK) --editable '.[dev]'
	@touch $@

OTHER_PYTEST = $(subst $(BIN)/python,build/$(1)/bin/python,$(subst $(abspath $(VENV))/torch,$(abspath build/$(1))/torch,$(PYTEST)))
define test_other_stack
	build/$(1)/bin/python -m pip list --format freeze | grep -iE '^(torch|transformers|accelerate|deepspeed|peft|trl|datasets|huggingface_hub|tokenizers|triton)='
	PATH=$(abspath build/$(1))/bin:$$PATH && $(OTHER_PYTEST) tests/internals
	PATH=$(abspath build/$(1))/bin:$$PATH && $(OTHER_PYTEST) $(or $(ARGS),tests/models tests/training tests/optim) -m $(QUICK)
endef

test-upstream: $(INSTALLED) ## transformers' own tests of models on our families, fetched with pip; a checkout of it has those of generation too: CHECKOUT=FOLDER
	$(BIN)/python tests/upstream/fetch.py $(CHECKOUT)
	$(PYTEST) -n $(WORKERS) --dist worksteal tests/upstream -m slow -rs $(ARGS)

matrix: $(INSTALLED) ## losses of 16 tiny recipes, plain, with 2 processes, ZeRO-2 and ZeRO-3; continues where it stopped: 25 minutes
	$(BIN)/python -m benchmarks.matrix $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## what CI runs: lint, then the test suite

docs: $(INSTALLED) ## the documentation as a site, build/docs/index.html; what leads nowhere fails the build
	$(SPHINX) -b html -d build/doctrees . build/docs

notebooks: $(INSTALLED) ## run docs/notebooks and keep what they show
	$(BIN)/python -m benchmarks.notebooks $(ARGS)

docs-links: $(INSTALLED) ## ask every address that the documentation names whether it is still there
	$(SPHINX) -b linkcheck -d build/doctrees . build/docs-links

bench-data: bench-peers ## compare the data layer with run_clm, TRL, datatrove and litdata: 25 minutes on 4 cores
	$(BIN)/python -m benchmarks.data $(ARGS)

bench-peers: $(INSTALLED) ## environments for the peers that the benchmark runs, in CPT_BENCH_ENVS or ~/.cache/cpt-bench
	$(BIN)/python -m benchmarks.data.environments

bench-plan: $(INSTALLED) ## compare `cpt plan` with a dry run of the whole step: 5 minutes
	$(BIN)/python -m benchmarks.plan $(ARGS)

bench-gpu: $(INSTALLED) ## training steps on a GPU compared with four other systems: 9 minutes on an H100 (ARGS="--cases D E F" for the rest)
	$(BIN)/python -m benchmarks.gpu.session $(or $(ARGS),--cases A B C)
	$(BIN)/python -m benchmarks.gpu.page

bench-packing: $(INSTALLED) ## supervised fine-tuning packed and padded, compared with TRL: 6 minutes
	$(BIN)/python -m benchmarks.packing $(ARGS)

bench-step: $(INSTALLED) ## the host's part of a step, compared with a bare loop and the plain Trainer: 2 minutes
	$(BIN)/python -m benchmarks.step $(ARGS)

bench-guards: $(INSTALLED) ## what guards and flags cost in a step: 5 minutes on 2 cores
	$(BIN)/python -m benchmarks.guards $(ARGS)

# DOCUMENTS holds these Debian packages: for name in postgresql-doc-15 python3.11-doc debian-policy installation-guide-amd64; do
#   apt-get download $name && dpkg -x ${name}_*.deb FOLDER; done
bench-documents: $(INSTALLED) ## what `cpt data ingest` keeps of real documents: 2 minutes on a core; make bench-documents DOCUMENTS=FOLDER
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m benchmarks.documents $(DOCUMENTS) $(ARGS)

# FOLDERS, unpacked: pip download --no-deps --no-binary axolotl axolotl==0.21.0 (with Python 3.12), llamafactory==0.9.5, ms-swift==4.6.0
bench-importing: $(INSTALLED) ## `cpt import` on every example config of other tools: a minute; make bench-importing FOLDERS='axolotl-0.21.0 ...'
	$(BIN)/python -m benchmarks.importing $(FOLDERS) $(ARGS)

bench-saving: $(INSTALLED) ## saving compared with the Trainer's, and how long training stalls: 10 minutes on 4 cores
	$(BIN)/python -m benchmarks.saving $(ARGS)

bench-verdict: $(INSTALLED) ## how often a verdict misleads, in simulated held-out sets: 20 minutes on 2 cores
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m benchmarks.verdict $(ARGS)

bench-replay: $(INSTALLED) ## replay that the base writes, compared with none and public text: 45 minutes on a core
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.replay $(ARGS)

bench-optimizers: $(INSTALLED) ## 8-bit moments and rounding compared with fp32 weights: 10 minutes on a core
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m benchmarks.optimizers $(ARGS)

train-prototype: $(INSTALLED) ## continue Nemotron 8B on one 24 GB GPU
	$(BIN)/accelerate launch --config_file launch/one_gpu.yaml cpt/train.py recipes/prototype_rtx4090.yaml $(ARGS)

train-production: $(INSTALLED) ## the production recipe on GPUS=4 GPUs of 80 GB
	$(BIN)/torchrun --nproc_per_node $(GPUS) cpt/train.py recipes/production_multi_gpu.yaml $(ARGS)

$(INSTALLED): pyproject.toml
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "cpt needs Python 3.11 or newer; none found. Name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(VENV): torch, the Hugging Face stack and our tools take a few minutes ..."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# pytest ends with 5 when no test carries the marker.
unless_there_are_none = { code=$$?; [ $$code = 5 ] && echo "no test is marked $(1) yet" || exit $$code; }
