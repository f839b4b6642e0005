# Everything a developer types. Needs Python 3.11 or newer and make; each target sets up what it needs by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
FOLDERS := core link daemon trainer_hooks rollout_hooks tests

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full check format wheel bench lock clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP) ## make .venv with the pinned packages and weightd itself (the others call it)

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "weightd needs Python 3.11 or newer, but '$(PYTHON)' is not (or is not there): make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' cannot make a virtual environment: install its venv package (Debian: python3-venv)" >&2; exit 2; }
	@echo "setting up $(VENV) (a few minutes the first time, most of it torch)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --requirement requirements/dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP) ## watch four trainer ranks feed an engine on two nodes, every byte compared
	$(BIN)/weightd demo

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest tests

test-full: $(STAMP) ## run the tests with the long matrices
	WEIGHTD_FULL=1 $(BIN)/python -m pytest tests --timeout=1800

check: $(STAMP) ## run the linters and both type checkers
	$(PIP) check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/pyright

format: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

wheel: $(STAMP) ## build the sdist and, through it, the wheel; import all of it in a clean venv
	$(BIN)/python .ci/check_wheel.py

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python -m bench

lock: ## resolve pyproject.toml anew and write requirements/dev.txt (torch stays: move its pin by hand)
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[daemon,dev]' \
	  "$$(grep '^torch==' requirements/dev.txt)"
	{ sed -n '/^#/p' requirements/dev.txt; \
	  build/lock/bin/python -m pip --disable-pip-version-check freeze --all --exclude-editable --exclude pip --exclude wheel \
	  | sed 's/+[a-z0-9.]*$$//' | LC_ALL=C sort -f; } > build/dev.txt
	mv build/dev.txt requirements/dev.txt
	rm -rf build/lock

clean: ## remove what builds, tests and checkers leave behind
	rm -rf build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(FOLDERS) src bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv, too
	rm -rf $(VENV)
