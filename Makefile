# These commands do everything on a fresh machine with Python 3.11 or newer and make:
#   make run     set up and train the default workload in the console
#   make test    set up and run lint, types, import contracts, docs, and a quick test of each promise
#   make serve   set up and list the screens; with SCREEN=live, open one with recorded data
# Others: test-all (also the tests that take seconds each), test-slow (more cases, and those that take longer),
# test-textual (the UI tests with the lowest and the highest Textual), test-extras (every optional dependency,
# installed and used), test-versions (scripts of other Pythons and versions of torch, in environments of their own),
# docs, dist, bench, faults (planted faults, over 70 minutes), hostile (damaged files, kills,
# limits, fuzzed input), gpu (measures a machine with an NVIDIA GPU in an hour, ARGS=--quick in 15 minutes), screenshots.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCH_VENV ?= $(VENV)-bench
GPU_VENV ?= $(VENV)-gpu
EXTRAS_VENV ?= $(VENV)-extras
# All optional dependencies of pyproject.toml; tests/extras fails when one is missing here.
EXTRAS ?= dev,docs,tensorboard,safetensors,wandb,mlflow,lightning,transformers,torchdata,bench
# Tests at a time, also on two cores: some of them wait for other processes. Each worker imports torch for itself.
JOBS ?= 3
# Compiled files are kept: without them each of hundreds of processes compiles the packages, and each worker the tests.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations 15 --durations-min 2
INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
PIP_BENCH := $(BENCH_VENV)/bin/python $(INSTALL)
# Both ends of the range in pyproject.toml.
TEXTUAL_RANGE ?= 6.0.0 8.2.8

.PHONY: run test quick test-all test-slow test-textual test-extras test-versions lint docs compiled dist bench faults gpu hostile screenshots serve clean

# In the background, so that a SIGTERM that only make receives reaches the program; a signal ends wait, not the program.
run: $(VENV)/.run
	@again=yes; child=; trap 'again=yes' INT; trap 'again=yes; kill -TERM $$child' TERM; exec 3<&0; \
	$(BIN)/ndd-console train $(ARGS) <&3 3<&- & child=$$!; \
	while [ $$again ]; do again=; wait $$child; status=$$?; done; \
	echo "call the program with: $(BIN)/ndd-console (or: make run ARGS='--max-steps 200' to train again);" >&2; \
	echo "to call it as ndd-console in this shell: source $(BIN)/activate" >&2; exit $$status

# The tiers are described in tests/tiers.py. The checks run beside the tests, which wait for other processes now and then.
test: $(VENV)/.docs
	@$(MAKE) --no-print-directory --jobs 2 docs compiled
	@$(MAKE) --no-print-directory --jobs 2 quick lint

quick: compiled
	$(PYTEST) -m "not slow and (promise or not long)"

test-all: export NDD_TEST_BUDGET = 1
test-all: test
	$(PYTEST) -m "not slow and long and not promise"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 1800

# Before a release: scripts of other Pythons. OTHER_PYTHON: also that of another environment with torch.
test-versions: $(VENV)/.dev
	$(BIN)/python -m tests.versions --folder $(VENV)-versions $(OTHER_PYTHON)

# The tests that use the real packages; without the packages they are skipped. REQUIRE_EXTRAS makes a skip a failure.
test-extras: $(EXTRAS_VENV)/.extras
	REQUIRE_EXTRAS=1 $(EXTRAS_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/extras \
		tests/train/test_loggers.py tests/train/test_export.py tests/docs/test_weights.py \
		tests/train/test_order.py

# Snapshots belong to the pinned version only.
test-textual: $(foreach version,$(TEXTUAL_RANGE),$(VENV)-textual-$(version)/.dev)
	@for version in $(TEXTUAL_RANGE); do \
		echo "Textual $$version" >&2; \
		$(VENV)-textual-$$version/bin/python -m pytest tests/ui tests/terminal -n $(JOBS) --dist loadfile \
			--ignore tests/ui/test_snapshots.py || exit 1; \
	done

# pytest compiles the tests when it collects them; the first time, its workers would all do so at the same time.
compiled: $(VENV)/.compiled

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Without --quiet: it would also silence the warnings that --strict counts.
docs: $(VENV)/.docs
	@$(BIN)/python docs/hooks.py --write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is installed into a fresh environment and trains a few steps there.
dist: $(VENV)/.dev
	rm -rf dist $(VENV)-dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python $(INSTALL) dist/*.whl
	$(VENV)-dist/bin/ndd-console --version
	$(VENV)-dist/bin/ndd-console --runs $(VENV)-dist/runs train --headless --max-steps 20 --set workload.size=tiny
	rm -rf $(VENV)-dist

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m benchmarks.faults $(ARGS)

# An environment of its own, which never replaces a torch with CUDA: see qa/gpu/setup.py. Exit status 3 without a
# GPU (make itself then returns 2). Without an index: python3 -m benchmarks.gpu, in a Python that has the packages.
gpu:
	@$(PYTHON) -m qa.gpu.setup $(GPU_VENV) $(ARGS)

hostile: $(VENV)/.dev
	$(BIN)/python -m tests.hostile $(ARGS)

screenshots: $(VENV)/.dev
	$(BIN)/python screenshots/take.py
	$(BIN)/python screenshots/tour.py

# A screen with recorded data, such as SCREEN=live; without a name, the list of screens.
serve: $(VENV)/.dev
	@$(BIN)/python -m tests.ui.serve $(SCREEN)

$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the dependencies into $(VENV); this takes a few minutes" >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, the dependencies and the development tools into $(VENV); this takes a few minutes" >&2
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.run

$(VENV)/.compiled: $(VENV)/.dev
	@$(BIN)/python -m pytest --collect-only -qq -o addopts= >/dev/null || true
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP) --editable '.[dev,docs]'
	@touch $@

$(EXTRAS_VENV)/.extras: pyproject.toml constraints.txt
	@test -x $(EXTRAS_VENV)/bin/python || $(PYTHON) -m venv $(EXTRAS_VENV)
	@echo "installing torch, the dependencies and all extras into $(EXTRAS_VENV); this takes a few minutes" >&2
	@$(EXTRAS_VENV)/bin/python $(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)-textual-%/.dev: pyproject.toml constraints.txt
	@test -x $(VENV)-textual-$*/bin/python || $(PYTHON) -m venv $(VENV)-textual-$*
	@$(VENV)-textual-$*/bin/python $(INSTALL) --editable '.[dev]'
	@$(VENV)-textual-$*/bin/python -m pip install --quiet --disable-pip-version-check textual==$*
	@touch $@

# The compared libraries install numpy and more: with a separate venv, the package and its tests cannot rely on it.
$(BENCH_VENV)/.bench: pyproject.toml constraints.txt
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	@echo "installing torch and the compared libraries into $(BENCH_VENV); this takes a few minutes" >&2
	@$(PIP_BENCH) --editable '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-versions-* $(BENCH_VENV) $(GPU_VENV) $(EXTRAS_VENV) $(foreach version,$(TEXTUAL_RANGE),$(VENV)-textual-$(version)) site dist \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis
