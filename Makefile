# `make demo` and `make test` need git, make and Python 3.11 with venv; they make .venv and install the rest with pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test test-slow check coverage clean

demo: $(READY) ## a real server and six real workers, one of them killed
	@$(BIN)/offbeat demo

test: $(READY) ## all tests but the slow ones
	@$(BIN)/pytest -q -m "not slow"

test-slow: $(READY) ## the slow ones
	@$(BIN)/pytest -q -m slow

check: $(READY) ## style, types, import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

coverage: $(READY) ## which lines no test runs
	@$(BIN)/pytest -q -m "not slow" --cov --cov-report=term-missing

clean: ## remove the environment
	rm -rf $(VENV)

# Set-up is repeated only when what it installs has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (once; a few minutes)..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
