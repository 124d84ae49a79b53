# Every target makes the virtual environment it needs, and makes it again when a file that decides its content changes.

PYTHON ?= python3
MATRIX ?= 5.3.0 5.12.1 newest
PYTEST_ARGS ?=

NEWEST := .venv/.stamp
MATRIX_STAMPS = $(patsubst %,.venv-%/.stamp,$(filter-out newest,$(MATRIX))) $(if $(filter newest,$(MATRIX)),$(NEWEST))
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
SAY_TESTS = -c 'from importlib.metadata import version; print("== tests, Transformers", version("transformers"), flush=True)'
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-matrix venvs bench lint types clean

help: ## Print the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: .venv/.stamp-demo ## Patch a real checkpoint and compare it with the stock model
	@.venv/bin/python examples/demo.py

test: $(NEWEST) ## Run the tests on the newest supported Transformers
	@.venv/bin/python $(SAY_TESTS)
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

test-matrix: venvs ## Run the tests on each Transformers of MATRIX
	@set -e; for version in $(MATRIX); do \
		folder=.venv-$$version; [ $$version != newest ] || folder=.venv; \
		$$folder/bin/python $(SAY_TESTS); \
		$$folder/bin/python -m pytest $(PYTEST_ARGS); \
	done

venvs: $(MATRIX_STAMPS) ## Make the virtual environments of MATRIX

bench: $(NEWEST) ## Measure the speed and print the table
	@echo "== benchmarks"
	@.venv/bin/python -m pytest benchmarks --quiet --capture=no $(PYTEST_ARGS)

lint: $(NEWEST) ## Check style and format
	@echo "== lint"
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

types: $(NEWEST) ## Check types
	@echo "== types"
	@.venv/bin/mypy

clean: ## Remove the virtual environments and the caches
	@rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks dist

INPUTS = requirements/dev.txt constraints.txt pyproject.toml

.venv/.stamp: requirements/transformers-newest.txt $(INPUTS)
	$(make_venv)

.venv-%/.stamp: requirements/transformers-%.txt $(INPUTS)
	$(make_venv)

.venv/.stamp-demo: requirements/demo.txt $(NEWEST)
	@echo "== .venv: installing the demo's checkpoint"
	@.venv/bin/python $(PIP_INSTALL) --no-deps -r $<
	@touch $@

# $< names the Transformers of this environment. The stamp comes last: an install that fails is tried again.
define make_venv
@echo "== $(@D): installing (the first time takes minutes)"
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
@$(PYTHON) -m venv $(@D)
@$(@D)/bin/python $(PIP_INSTALL) -c constraints.txt -r requirements/dev.txt -r $< -e .
@touch $@
endef
