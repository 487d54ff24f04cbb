# `make demo` and `make test` work on a fresh machine that has Python 3.10 or later with pip, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs pictures clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group lint --group docs --editable '.[yaml]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py --output demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck examples/*.sh

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build
	@echo open docs/_build/index.html

pictures: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group pictures '.[plot]'
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/render.py

test: lint
	$(BIN)/pytest

clean:
	rm -rf build dist demo docs/_build .mypy_cache .pytest_cache .ruff_cache
