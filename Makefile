# make serve   install into .venv and serve the bundled demo model:  make serve ARGS="/path/to/model --port 9000"
# make test    install with the test extras and run the quick tests
# make test-all   ... and the slow ones; JOBS=8: eight processes run them, where there are cores for as many
# make lint    ruff and mypy
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# The tests of a file share servers, so a process runs whole files; in their order, for the longest are not the last.
TESTS_TOGETHER = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
TESTS_ALONE = $(BIN)/python -m pytest

.PHONY: serve test test-all lint format clean

serve: $(VENV)/.installed
	@$(BIN)/vserve $(ARGS)

test: $(VENV)/.installed-test
	$(TESTS_TOGETHER) -m "not slow and not alone and not gpu"
	$(TESTS_ALONE) -m "not slow and (alone or gpu)"

test-all: $(VENV)/.installed-test
	$(TESTS_TOGETHER) -m "not alone and not gpu"
	$(TESTS_ALONE) -m "alone or gpu"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "vserve needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing vserve and what it needs (torch is large; a few minutes on a slow line) ..."
	$(PIP_INSTALL) --editable .
	@touch $@

# The link gives mypy the package's name: the root folder may be called anything.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test extras ..."
	$(PIP_INSTALL) --editable ".[test]"
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/vserve
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
