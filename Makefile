# make demo and make test set up what they need; see README.md.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STUBS  := .venv-stubs

.PHONY: setup demo test check stubs lock clean

setup: $(VENV)/.installed

# torch comes first and by its exact version: a range, or another package's wish, fetches a far larger build.
$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "turngym needs Python 3.11 or later; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[all,dev]'
	@touch $@

# Stubs are made apart from everything else: this grpcio-tools stamps the oldest protobuf that turngym supports.
$(STUBS)/.installed:
	$(PYTHON) -m venv $(STUBS)
	$(STUBS)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.71.2 mypy-protobuf==3.6.0 'setuptools<81' googleapis-common-protos==1.66.0
	@touch $@

stubs: $(STUBS)/.installed
	$(STUBS)/bin/python proto/make_stubs.py

demo: setup
	$(BIN)/python -m turngym_leaderboard.demo

test: setup $(STUBS)/.installed
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

check: setup $(STUBS)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python -m pytest tests/test_layering.py --quiet
	$(STUBS)/bin/python proto/make_stubs.py --check

# The versions that make installs; the ranges are in pyproject.toml.
lock: setup
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock

clean:
	rm -rf $(VENV) $(STUBS)
