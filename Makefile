# Two commands do everything on a fresh machine with Python 3.11 to 3.13 and make:
#   make run     set up and train the default workload in the console
#   make test    set up and run lint, types, import contracts and tests
# `make test-slow` runs the tests that take over a minute each.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-slow lint bench screenshots clean

run: $(VENV)/.run
	@$(BIN)/ndd-console train $(ARGS)

test: lint
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

screenshots: $(VENV)/.dev
	$(BIN)/python screenshots/take.py

$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing (torch is large; the first time takes a while)" >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
