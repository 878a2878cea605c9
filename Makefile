# The commands a newcomer needs. Only Python 3.11+ (with pip), git and make are assumed.
# make setup      install into .venv
# make demo       allocate an emulated fleet on this machine and infer with it
# make test       the tests; make test-all adds those that take minutes; make check lints and types

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that really runs and is new enough: a version manager's shim may exist without one behind it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)

.PHONY: setup demo test test-all check clean

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/splitfleet demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not exhaustive" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .bootstrap .demo build dist *.egg-info

# Some systems ship Python without the venv module's pip; virtualenv, fetched beside it, brings its own.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; name one with  make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && $(PYTHON) -m pip install --quiet --target .bootstrap virtualenv \
		&& PYTHONPATH=.bootstrap $(PYTHON) -m virtualenv --quiet $(VENV); }

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -e ".[cloud]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@
