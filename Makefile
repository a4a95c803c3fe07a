# Everything a person or CI runs. Each target brings its own environment up to date first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= .demo/model
TP ?= 2
PYTEST_ARGS ?=

# The stamp's name holds a digest of what is installed and where, so a changed pin or a moved checkout reinstalls.
DIGEST := $(shell (cat requirements.txt requirements-dev.txt pyproject.toml; echo $(CURDIR)) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(DIGEST)

.PHONY: help install demo serve test gpu-test lint format bench clean

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

demo: install ## start a server on two ranks, run 16 streams at once, check and print what came back
	$(BIN)/python -m bireme.demo

.demo/model/config.json: | install
	$(BIN)/python -c 'from bireme.dummy import write_dummy_checkpoint; write_dummy_checkpoint(".demo/model")'

serve: install $(if $(filter .demo/model,$(MODEL)),.demo/model/config.json) ## serve MODEL=<folder> on TP=<ranks> (a tiny random model by default)
	$(BIN)/bireme serve $(MODEL) --tp $(TP)

test: install ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

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
	rm -rf $(VENV) .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
