# Everything a person or CI runs. Each target brings its own environment up to date first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= pocket
TP ?= 2
PYTEST_ARGS ?=
CLIENTS_VENV ?= .venv-clients
FUZZ_CASES ?= 5000
FUZZ_SEED ?= 0

# The stamp's name holds a digest of what is installed and where, so a changed pin or a moved checkout reinstalls.
DIGEST := $(shell (cat requirements.txt requirements-dev.txt pyproject.toml; echo $(CURDIR)) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(DIGEST)

.PHONY: help install demo serve eval test gpu-test clients-test fuzz docs lint format bench clean

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

gpu-test: $(if $(GPU_PYTHON),,install) ## the tests that need a CUDA device (GPU_PYTHON=NAME takes that interpreter as it is)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu $(PYTEST_ARGS)

clients-test: install ## foreign clients (openai-agents, langchain, litellm, lm-eval, guidellm, …) against the pocket model
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	BIREME_SERVER_PYTHON=$(BIN)/python $(CLIENTS_VENV)/bin/python -m pytest tests/clients $(PYTEST_ARGS)

fuzz: install ## FUZZ_CASES malformed requests against a server on the simulated engine
	BIREME_FUZZ_CASES=$(FUZZ_CASES) BIREME_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest -s tests/test_server_fuzz.py $(PYTEST_ARGS)

docs: install ## write the pages that are made from the code
	$(BIN)/python -m bireme.server.parameters docs/parameters.md

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
	rm -rf $(VENV) $(CLIENTS_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
