# Everything happens in .venv, which is made from pyproject.toml on first use and again when that file changes.
# `make help` lists what there is. `make PYTHON=/path/to/python` names the Python to make it with.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_QUIET := -qq --disable-pip-version-check --no-input

SUITE := $(BIN)/python scripts/leaves-nothing-running $(BIN)/python -m pytest -q -n 3 --dist worksteal --durations=20
IN_MEMORY := $(BIN)/python scripts/in-memory
FAILED := $(VENV)/.failed
ON_DISK := tests/examples tests/faults tests/manager tests/processes

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench soak setup tools ready lint types imports
MAKEFLAGS += --no-print-directory
# The tests start hundreds of processes; without compiled files each would spend a quarter of a second on compiling.
unexport PYTHONDONTWRITEBYTECODE

help: ## list these commands
	@echo "Holdfast. Each command sets up what it needs the first time."
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## a day at a research desk: agents, workflow, conflict, decision, tasks; four killed with -9, every promise checked (30 s)
	@$(BIN)/python examples/demo.py

# Most tests wait as much as they compute, so three at a time. First those that need no disk; then, on one, those about processes
# that are killed and disks that fail.
test: ready ## everything that must hold before a change is merged: the static checks, then the whole suite
	@rm -f $(FAILED); failed=0; export HOLDFAST_FAILED=$(FAILED); \
	$(IN_MEMORY) $(SUITE) $(addprefix --ignore=,$(ON_DISK)) || failed=1; $(SUITE) $(ON_DISK) || failed=1; \
	if [ -e $(FAILED) ]; then echo "what failed:"; cat $(FAILED); fi; exit $$failed

check: setup lint types imports ## the static part: lint, format, types, and which module may import which
	@echo "check: lint, format, types and imports are in order"

bench: setup tools ## our speed beside a peer's in the same run, as JSON lines
	@$(BIN)/python -m benchmarks

soak: setup tools ## the suite at full size, on a disk: more rounds, more kills, more operations, every layer on every engine
	@HOLDFAST_SOAK=1 $(BIN)/python scripts/leaves-nothing-running $(BIN)/python -m pytest -q --durations=20

# --- what the commands above need ---

# The system's packages, Python's and the checks do not wait for each other.
ready:
	@$(MAKE) -j2 tools check

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "these files are not formatted; run: $(BIN)/ruff format ." >&2; $(BIN)/ruff format --check . >&2; exit 1; }

types: setup
	@$(BIN)/mypy --no-error-summary

imports: setup
	@out=$$($(BIN)/lint-imports 2>&1) || { echo "$$out" >&2; exit 1; }

setup: $(READY)

tools:
	@scripts/system-packages

# A Python without ensurepip (Debian splits it off) still makes an environment, with the pip it has beside it.
$(READY): pyproject.toml
	@test -x $(BIN)/pip || { \
		python="$(PYTHON)"; python=$${python:-$$(scripts/choose-python)} || exit 1; \
		echo "making $(VENV) with $$($$python --version), $$python"; \
		$$python -m venv --clear $(VENV) >/dev/null 2>&1 || { \
			$$python -m venv --clear --without-pip $(VENV) && \
			$$python -m pip --python $(BIN)/python install $(PIP_QUIET) pip; }; }
	@echo "installing Holdfast and its tools into $(VENV)"
	@scripts/python-packages dev
	@touch $@
