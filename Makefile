# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
#
# make demo    build, install and serve a tiny GLM-DSA GGUF; ask it a question
# make test    build, install and run all tests
# Both make what they need in .venv, for the CPU, with Python 3.11 or newer.

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
# Tests of one file share servers, engines and files, so one worker runs them all. By name
# the long files come first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
SOURCES := $(shell git ls-files vfork edits vllm upstream.toml pyproject.toml \
	CMakeLists.txt cmake csrc)
FORK := $(VENV)/.fork
TESTS := $(VENV)/.test-requirements
SITE = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

export VLLM_TARGET_DEVICE := $(DEVICE)

.PHONY: demo test lint wheel check diff clean

demo: $(FORK)
	$(BIN)/python examples/demo.py

test: $(FORK) $(TESTS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy follows imports into the installed release.
lint: $(FORK) $(VENV)/.lint-requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/gguf/* tests/csrc/*.[ch]* tests/csrc/stand_ins/*

wheel:
	$(PYTHON) -m vfork wheel --base $(DEVICE) --out dist

check:
	$(PYTHON) -m vfork fetch
	$(PYTHON) -m vfork check

diff:
	$(PYTHON) -m vfork diff

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The first time the wheel is built and installed; then only what changed is laid over.
$(FORK): $(BIN)/python $(SOURCES)
	@if [ -f $@ ]; then $(PYTHON) -m vfork sync $(SITE); \
	else $(BIN)/python -m pip install . && $(BIN)/python -m pip check; fi
	@touch $@

$(TESTS): requirements/test.txt $(FORK)
	$(BIN)/python -m pip install -r requirements/test.txt
	@touch $@

$(VENV)/.lint-requirements: requirements/lint.txt $(FORK)
	$(BIN)/python -m pip install -r requirements/lint.txt
	@touch $@

clean:
	rm -rf $(VENV) dist
