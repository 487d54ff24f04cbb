# `make demo` and `make test` work on a fresh machine that has Python 3.10 or later with pip, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Readers of other projects, each pinned. ET_REPLAY is not on PyPI; this is the commit that mlc-chakra 1.0.0 names.
# `make interop ET_REPLAY=` leaves it out, and its tests skip.
INTEROP := .venv-interop
INTEROP_BIN := $(INTEROP)/bin
ET_REPLAY ?= et_replay @ git+https://github.com/facebookresearch/param.git@7b19f586dd8b267333114992833a0d7e0d601630\#subdirectory=et_replay

.PHONY: demo test lint docs pictures interop compat clean

$(STAMP): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV): some minutes and 1.5 GB of disk, once'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group lint --group docs --editable '.[yaml,plot]'
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
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group pictures
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/render.py

# Two at a time, for most tests wait for other processes; by file, for the code blocks of a page follow on each other.
test: lint
	$(BIN)/pytest -n 2 --dist loadfile

# Needs the network and 1 GB.
$(INTEROP)/.installed: pyproject.toml constraints.txt
	test -x $(INTEROP_BIN)/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP_BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(INTEROP_BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(INTEROP_BIN)/python -m pip install --quiet --constraint constraints.txt --group test --editable '.[convert]' 'HolisticTraceAnalysis==0.5.0'
	test -z '$(ET_REPLAY)' || $(INTEROP_BIN)/python -m pip install --quiet '$(ET_REPLAY)'
	touch $@

interop: $(INTEROP)/.installed
	$(INTEROP_BIN)/pytest -m interop

# The suite with the oldest versions that are supported, with ones in between, and with the newest.
compat:
	.ci/compat 2.9.1 2.5.6
	.ci/compat newest newest

clean:
	rm -rf build dist demo docs/_build .mypy_cache .pytest_cache .ruff_cache
