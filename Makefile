# `make run` trains the default model, `make test` runs the everyday suite, `make check` is everything CI does.
# The program's own exit codes (0, 2, 3, 4, 5, 75) do not pass through make, which ends with 2 on any failure and names
# the real one in its last line; scripts that need them call `.venv/bin/python -m lib.run` themselves.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --editable
SETTINGS := pyproject.toml constraints.txt

.PHONY: run test check lint

run: $(VENV)/.installed-run
	@$(BIN)/python -m lib.run $(ARGS)

# A process for each core, four at most; the tests of one file stay together, since they share what is compiled.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile $(ARGS)

check: lint
	$(BIN)/python -m pytest -m "" $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The stamps keep a second call from installing again; what tests need holds all that a run needs.
$(VENV)/.installed-run: $(BIN)/pip $(SETTINGS)
	@echo "Installing into $(VENV) (once, a few minutes) ..."
	@$(INSTALL) ".[plot,data,safetensors]"
	@touch $@

$(VENV)/.installed-test: $(BIN)/pip $(SETTINGS)
	@echo "Installing into $(VENV) (once, a few minutes) ..."
	@$(INSTALL) ".[test,plot,data,safetensors,bench]"
	@touch $(VENV)/.installed-run $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
		echo "PYTHON=$(PYTHON) is not on this machine, purestep wants Python 3.11 or newer;" \
			"install one or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1), purestep wants Python 3.11 or newer;" \
			"name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
