# Two commands do everything on a fresh machine with Python 3.11 to 3.13 and make:
#   make run     set up and train the default workload in the console
#   make test    set up and run lint, types, import contracts and tests
# `make test-slow` runs the tests that take long; `make faults` plants faults and looks whether they are
# named and cured (about 70 minutes).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCH_VENV ?= $(VENV)-bench
# Test files at a time.
JOBS ?= 2
INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
PIP_BENCH := $(BENCH_VENV)/bin/python $(INSTALL)

.PHONY: run test test-slow lint bench faults screenshots clean

run: $(VENV)/.run
	@$(BIN)/ndd-console train $(ARGS)

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 1800

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m benchmarks.faults $(ARGS)

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

# The rivals bring numpy and more: a venv of their own, so that the product and its tests are seen to need none of it.
$(BENCH_VENV)/.bench: pyproject.toml constraints.txt
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "installing the benchmarks' own environment (torch is large; the first time takes a while)" >&2
	@$(PIP_BENCH) --editable '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
