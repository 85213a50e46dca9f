# make demo   set up from nothing, capture the three built-in models, replay what was recorded
# make test   set up, then lint, types and all tests
# make clean  forget the environment and the recordings

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test clean
demo: $(READY)
	$(BIN)/capture --model cogvideo --size tiny --max 5 --overwrite
	$(BIN)/capture --model flux --size tiny --max 5 --overwrite
	$(BIN)/capture --model llama --size tiny --max 5 --overwrite
	$(BIN)/replay --dir captured_inputs --metric all

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# torch first and alone: its exact version is the only thing that picks its wheel.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) captured_inputs
