# make demo: train five schemes short and test them long.   make test: every check.
# Both set up all they need in .venv first; the second time that is there already.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test format
.DELETE_ON_ERROR:

# pip must know dependency groups (25.1); older ones come with many Pythons.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

$(VENV)/lab: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab]"
	touch $@

$(VENV)/dev: $(VENV)/lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

demo: $(VENV)/lab
	$(BIN)/attention-priors compare recipes/demo.yaml --output runs/demo

test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist loadfile

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
