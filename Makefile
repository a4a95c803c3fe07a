# Everything a person or CI runs. Each target brings its own environment up to date first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= pocket
TP ?= 2
PYTEST_ARGS ?=

# The stamp's name holds a digest of what is installed and where, so a changed pin or a moved checkout reinstalls.
DIGEST := $(shell (cat requirements.txt requirements-dev.txt pyproject.toml; echo $(CURDIR)) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(DIGEST)

.PHONY: help install demo serve eval test gpu-test lint format bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Bireme needs Python 3.11 or newer (PYTHON=$(PYTHON))" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	rm -f $(VENV)/.installed-*
	touch $@

install: $(STAMP) ## create or update the environment in .venv

demo: install ## serve the pocket model on two ranks, ask 16 questions at once, check the answers
	$(BIN)/python -m bireme.demo

serve: install ## serve MODEL=<folder> on TP=<ranks> (the pocket model on two by default)
	$(BIN)/bireme serve $(MODEL) --tp $(TP)

eval: install ## score the pocket model on unseen cases of every skill, through the server on TP=<ranks>
	$(BIN)/bireme eval pocket --tp $(TP) --require overall=95 --require each=90 --require recall=95

test: install ## every test; those that need a GPU are skipped where there is none
	$(BIN)/python -m pytest $(PYTEST_ARGS)

gpu-test: install ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: install ## formatter, linter, type checker and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_rules.py

format: install ## rewrite the code the way `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## decode throughput, batched against per-request, on one rank and on two
	$(BIN)/bireme bench decode --tp 1
	$(BIN)/bireme bench decode --tp 2

clean: ## remove the environment and everything generated
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
