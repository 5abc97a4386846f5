# Every target does its own set-up. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup pair demo test check lint types slow clean

help:
	@echo "make demo   build the embedded pair, stream a completion, show the gain over the server alone"
	@echo "make test   lint, types and the ordinary test suite"
	@echo "make slow   the long statistical and soak tests"
	@echo "make clean  remove what was built here (not the user cache)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip "setuptools>=77" wheel
	$(PIP) install --constraint constraints.txt --editable ".[test]"
	@touch $(STAMP)

setup: $(STAMP)

pair: $(STAMP)
	$(BIN)/paceline models build smollm2

demo: pair
	$(BIN)/paceline demo

test: pair lint types
	$(PYTEST)

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	@mkdir -p build/types/paceline
	@for room in bench client models server shared; do ln -sfn ../../../$$room build/types/paceline/$$room; done
	$(BIN)/mypy

slow: pair
	$(PYTEST) -m slow

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)
