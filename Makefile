# `make demo` shows what Patchlight does, `make test` proves it; both set everything up in .venv first.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format clean

demo: .venv/installed
	$(BIN)/patchlight crop demo --out out/demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Patchlight needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $@

# timm and torchvision ask for a torch of their own; tests/oracles.py makes them import beside ours.
.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps timm torchvision
	@touch $@
