# `make demo` shows what Patchlight does, `make test` proves it; both set everything up in .venv first.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-fast check docs wheel audit format clean

demo: .venv/installed
	$(BIN)/patchlight crop demo --out out/demo

# Each core begins with a part of its own, so that what a file prepares is prepared once.
test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal

# For the inner loop: without what tests/slow.txt names, in less than a minute on two cores.
test-fast: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist worksteal --fast

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract

# The site: the lessons with their pictures, docs/, the API and the command line; fails on a link that leads nowhere.
docs: .venv/installed-docs
	$(BIN)/python docs/make_site.py

# What `pip install patchlight` will give: built, installed into an empty environment, and used in an empty folder; and
# beside it an SBOM of what came with it there.
wheel: .venv/installed-dev
	rm -rf out/wheel
	$(BIN)/python -m build --outdir out/wheel .
	$(PYTHON) -m venv out/wheel/venv
	out/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt out/wheel/*.whl
	out/wheel/venv/bin/python scripts/supply_chain.py sbom out/wheel/*.whl
	mkdir out/wheel/empty
	cd out/wheel/empty && ../venv/bin/patchlight crop ../../../demo --out cropped && test -s cropped/report.html
	cd out/wheel/empty && ../venv/bin/patchlight recipes --copy recipes && test -s recipes/cifar10.py
	cd out/wheel/empty && ../venv/bin/python -c "import pathlib, patchlight; \
	  assert 'wheel' in patchlight.__file__; assert pathlib.Path(patchlight.__file__).with_name('py.typed').exists()"

# The licences of what comes with Patchlight, and what is known against it: asks a service, and says so where it cannot.
audit: .venv/installed
	$(BIN)/python scripts/supply_chain.py licences
	$(PYTHON) -m venv out/audit
	out/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	out/audit/bin/python scripts/supply_chain.py audit

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

.venv/installed-docs: .venv/installed
	$(INSTALL) -e '.[docs]'
	@touch $@

# timm and torchvision ask for a torch of their own; tests/oracles.py makes them import beside ours.
.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps timm torchvision
	@touch $@
