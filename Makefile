# `make demo` and `make test` need git, make and Python 3.11 with venv; they make .venv and install the rest with pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOWER := .venv-flower
FLOWER_READY := $(FLOWER)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
# The tests start hundreds of processes: each would compile the package for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-flower check coverage bench soak faults clean

demo: $(READY) ## a real server and six real workers, one of them killed
	@$(BIN)/offbeat demo

test: $(READY) ## all tests but the slow ones
	@$(BIN)/pytest -q -m "not slow" --numprocesses 2 --dist loadfile

test-slow: $(READY) test-flower ## the slow ones
	@$(BIN)/pytest -q -m "slow and not alone" --numprocesses 2 --dist loadfile
	@$(BIN)/pytest -q -m alone

test-flower: $(FLOWER_READY) ## those on Flower, which has an environment of its own
	@$(FLOWER)/bin/pytest -q tests/flower src/offbeat/flower

check: $(READY) ## style, types, import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

coverage: $(READY) ## which lines no test runs
	@$(BIN)/pytest -q -m "not slow" --cov --cov-report=term-missing

bench: $(READY) ## how fast Offbeat is on this machine; options in ARGS, say ARGS="--quick --json"
	@$(BIN)/python -m benchmarks all $(ARGS)

SOAK_S ?= 3600
SEEDS ?= 2000

soak: $(READY) ## kill, stall and lie to real processes for SOAK_S seconds; options in ARGS, say ARGS="--seed 7"
	@$(BIN)/python -m tests.soak --seconds $(SOAK_S) $(ARGS)

faults: $(READY) ## run SEEDS seeds of the fault simulation on all cores
	@$(BIN)/python -m tests.simulation.many_faults $(SEEDS) $(ARGS)

clean: ## remove the environments
	rm -rf $(VENV) $(FLOWER)

# Set-up is repeated only when what it installs has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (once; a few minutes)..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

# Torch first: it is the largest, and nothing else may choose its version. Flower last and alone: see the file.
$(FLOWER_READY): export PIP_CONSTRAINT := $(CURDIR)/constraints-flower.txt
$(FLOWER_READY): pyproject.toml constraints-flower.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(FLOWER) (once; a few minutes)..."
	@$(PYTHON) -m venv $(FLOWER)
	@$(FLOWER)/bin/pip install --quiet torch
	@$(FLOWER)/bin/pip install --quiet --no-deps --requirement constraints-flower.txt
	@$(FLOWER)/bin/pip install --quiet --editable '.[digits,fast,plots]'
	@touch $@
