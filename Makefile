# Everything that a newcomer and .ci/run need: git, make and Python 3.11 or newer with its venv module, no compiler.
# The first target sets up .venv with exactly the versions of requirements.lock.

PYTHON ?= python3
DURATION ?= 60s
# Tests in parallel: two workers is what two cores carry without starving each other's servers.
WORKERS ?= 2
VLLM_VENV ?= .cache/vllm

BIN := .venv/bin
UV := $(BIN)/uv
PYTEST := $(BIN)/python -m pytest
CODE := loadgen workloads monitors tests

.DEFAULT_GOAL := help
.PHONY: help setup soak test test-slow bench-accuracy bench-client bench-monitors lint format real real-vllm lock lock-check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' $(MAKEFILE_LIST) | expand -t 18

setup: .venv/ready ## .venv with the locked versions and loadgen itself

# pip installs uv, uv the rest in seconds; both check every file against the lock's hashes. --only-binary makes a missing
# wheel an error instead of a compiler run. Bytecode is compiled now: an engine starts in half the time, and where Python
# may not write it later, each process of a run would compile numpy anew.
.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit("$(PYTHON) is %d.%d: loadgen needs Python 3.11 or newer (make PYTHON=python3.12)" % v[:2])'
	@echo "setting up .venv (once, up to a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --require-hashes --requirement .venv/uv.lock
	@$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --only-binary :all: --require-hashes --requirement requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --offline --editable .
	@touch $@

soak: setup ## mixed soak of the embedded simulated server (DURATION=60s)
	@$(BIN)/loadgen run soak-600s --sim tiny --duration $(DURATION)

test: setup ## what must hold, in minutes
	@$(BIN)/python tests/real/smollm2.py >/dev/null || echo "so the tests of a real server will be skipped"
	$(PYTEST) -m "not slow and not real" --numprocesses $(WORKERS) --dist loadfile
	$(PYTEST) -m "real and not slow"  # alone: the model needs a core of its own

test-slow: setup ## what takes longer
	$(PYTEST) -m slow || [ $$? -eq 5 ]  # 5: there is none

# The rig's C and C++ are built where a compiler is; nothing that we ship needs one.
.cache/rig/truth_server: tests/rig/truth_server.cpp
	@mkdir -p $(@D) && g++ -std=c++17 -O2 -Wall -Wextra -o $@ $<

.cache/rig/c_reader: tests/rig/c_reader.c
	@mkdir -p $(@D) && gcc -O2 -Wall -Wextra -o $@ $<

bench-accuracy: setup ## our client's times against a ground-truth server, 1 to 1,000 streams (BENCH="--streams 256")
	@$(BIN)/python -m tests.rig.bench_accuracy $(BENCH)

bench-client: setup ## CPU per chunk beside a C reader and the peers installed (BENCH="--peer vllm,aiperf")
	@$(BIN)/python -m tests.rig.bench_client $(BENCH)

bench-monitors: setup ## what the monitors cost, how late they are, how soon a kill is written (BENCH="--seconds 10")
	@$(BIN)/python -m tests.rig.bench_monitors $(BENCH)

lint: setup ## formatting, lint, types
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: setup ## put the code into shape
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

real: setup ## the soak against a real llama.cpp server with a small real model (DURATION=60s)
	@$(BIN)/python tests/real/soak.py llamacpp --duration $(DURATION)

real-vllm: setup ## the soak against a real vLLM on the CPU (VLLM_VENV=.cache/vllm)
	@$(BIN)/python tests/real/soak.py vllm --serve "--venv $(VLLM_VENV)" --duration $(DURATION)

lock: setup ## resolve anew: newest versions that pyproject.toml allows, for every platform
	$(UV) pip compile pyproject.toml --group dev --extra real --extra ray --universal --python-version 3.11 --upgrade --quiet \
	  --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock

lock-check: setup ## the lock installs without a compiler on x86-64 and aarch64, Python 3.11 to 3.14
	$(PYTEST) -m slow tests/test_lock.py

clean: ## remove what was made, keep the runs
	rm -rf .venv .cache dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
