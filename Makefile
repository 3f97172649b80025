# The two commands are `make test` and `make check`; both set up .venv on first use.
# Every path below is relative to this folder, so a checkout under a path with spaces works too.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup check test lint format clean

ROOT := $(shell cd "$$(dirname "$(strip $(MAKEFILE_LIST))")" && pwd -P)
ifneq ($(ROOT),$(shell pwd -P))
# Reached as `make -f PATH/Makefile` from another folder: go there first.
help setup check test lint format clean:
	@$(MAKE) --no-print-directory -C "$(ROOT)" $@
else

help: ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1@\2/p' Makefile | \
		while IFS=@ read -r name text; do printf 'make %-8s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## create .venv and install the project with its pinned tools, if that is not done yet

check: $(STAMP) ## judge the reference provider against the contract and the golden hashes
	$(BIN)/python scripts/check_p1.py --provider reference

test: lint ## lint, check types, then run every test
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP) ## ruff check, ruff format --check and mypy; changes no file
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP) ## let ruff mend and format what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp goes first and comes back last. A run that finds none starts from an empty venv, since an
# install may have been cut short; a run that finds an old one brings the venv up to date in place.
# The build backend is installed beside the tools, so its own dependencies are pinned as well.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { echo "make: '$(PYTHON)' was not found." \
		"Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: Python 3.10 or newer is needed, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." \
		"Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot create" \
		"virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@if [ -f $(STAMP) ]; then rm $(STAMP); else "$(PYTHON)" -m venv --clear $(VENV); fi
	$(PIP_INSTALL) hatchling
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $(STAMP)

endif
