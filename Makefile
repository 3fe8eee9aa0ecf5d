# make demo: train five schemes short and test them long.   make test: every check.
# make pages: draw the tables and figures of docs/results anew, from the rows that are there, and the tables of
# docs/priors.md, from the classes of priors.
# make results: train everything that docs/results shows anew, in runs/results. Takes days on two cores; interrupt it
# when you like. docs/results/README.md says how new rows get there.
# make benchmarks: measure what docs/benchmarks shows anew, in runs/benchmarks, on a machine with nothing else to do.
# make docs: build the site in runs/site, with its tutorials executed; strict.
# Every target sets up what it needs in .venv first; the second time that is there already.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := tests/priors tests/encodings tests/attention
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile

RESULTS ?= runs/results
BENCHMARKS ?= runs/benchmarks
RECIPES := $(wildcard recipes/results/*.yaml) recipes/digits-tuning.yaml recipes/digits.yaml
PAGES := $(wildcard docs/results/*/README.md)

.PHONY: demo test check lint tests core test-deep pages docs results benchmarks format
.DELETE_ON_ERROR:

# pip must know dependency groups (25.1); older ones come with many Pythons.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(VENV)/lab: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab,images]"
	touch $@

$(VENV)/dev: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

demo: $(VENV)/lab
	$(BIN)/attention-priors compare recipes/demo.yaml --output runs/demo

pages: $(VENV)/lab
	$(BIN)/attention-priors report $(dir $(PAGES))
	$(BIN)/python docs/catalogue.py

$(VENV)/docs: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

# Pages depend on the code: every build reads all of them anew.
docs: $(VENV)/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir runs/site-doctrees docs runs/site

$(VENV)/genomes: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group genomes
	touch $@

results: $(VENV)/genomes
	@failed=; for recipe in $(RECIPES); do \
		$(BIN)/attention-priors compare $$recipe --output $(RESULTS)/$$(basename $$recipe .yaml) \
			|| { status=$$?; [ $$status -ne 130 ] || exit 130; failed="$$failed $$recipe"; }; \
	done; [ -z "$$failed" ] || { echo "not made:$$failed"; exit 1; }

$(VENV)/peers: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group peers
	touch $@

benchmarks: $(VENV)/peers
	for recipe in $(wildcard benchmarks/cpu*.yaml); do \
		$(BIN)/attention-priors bench $$recipe --output $(BENCHMARKS)/$$(basename $$recipe .yaml) || exit; \
	done
	[ -e $(BENCHMARKS)/attached.json ] || $(BIN)/python benchmarks/attached.py --repetitions 15 --output $(BENCHMARKS)/attached.json

tests core test-deep docs: export OMP_NUM_THREADS := 1

# Types take one core's time while tests take the other's.
test: $(VENV)/dev
	$(MAKE) --no-print-directory --jobs=2 lint tests

# For while one works: lint, contracts, types of the source and of the core's tests, and those tests but the slow ones.
check: $(VENV)/dev
	$(MAKE) --no-print-directory --jobs=2 lint core TYPED="src $(CORE)"

# TYPED: what types are read of; all, if it is not given.
lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright $(TYPED)

tests: $(VENV)/dev
	$(PYTEST)

# Types are what takes longest: tests leave them their core.
core: $(VENV)/dev
	nice $(PYTEST) -m "not slow" $(CORE)

# Ten times the drawn examples, and every combination: hours.
test-deep: $(VENV)/dev
	TEST_DEPTH=deep $(PYTEST)

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
