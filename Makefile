# make demo           set up from nothing, capture the three built-in models, replay what was recorded,
#                     and write report.html
# make test           set up, then lint, types, the docs' tables and the quick tests
# make test-all       the same with the slow tests too, as CI
# make docs           the docs as a site, in site/; a dead link fails
# make compatibility  try old, middle and new libraries, and write the versions in docs/index.md
# make dist           build both wheels in dist/, check them, and try each in a clean environment
# make hub            write attention_kernels to build/hub/, as the Hugging Face Hub's `kernels` loads it
# make clean          forget the environments, the recordings and the release

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt
# Compiling every installed module takes longer than the tests of one folder. Python compiles those
# that are imported, and stores them in spite of an environment that forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all quick-tests all-tests lint style types docs compatibility dist hub clean
demo: $(READY)
	$(BIN)/capture --model cogvideo --size tiny --max 5 --overwrite
	$(BIN)/capture --model flux --size tiny --max 5 --overwrite
	$(BIN)/capture --model llama --size tiny --max 5 --overwrite
	$(BIN)/replay --dir captured_inputs --report report.html

# mypy has one thread, and the tests do not use all processors all the time.
test: style
	$(MAKE) --no-print-directory --jobs 2 types quick-tests

test-all: style
	$(MAKE) --no-print-directory --jobs 2 types all-tests

quick-tests: $(READY)
	$(BIN)/pytest -n auto --maxprocesses 8 -m 'not slow'

all-tests: $(READY)
	$(BIN)/pytest -n auto --maxprocesses 8

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m benchmarks.tables --check

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m benchmarks.picture
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

compatibility: $(READY)
	$(BIN)/python -m compatibility

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist attention_kernels
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m compatibility.wheel dist/*.whl

hub: $(READY)
	$(BIN)/python -m compatibility.hub

# torch first and alone: its exact version is the only thing that picks its wheel.
$(READY): pyproject.toml attention_kernels/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[all,dev]' --editable ./attention_kernels
	touch $(READY)

clean:
	rm -rf $(VENV) captured_inputs report.html build attention_kernels/build dist site
