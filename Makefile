# Every target works in a fresh clone: what needs .venv makes it first.
# Settings: PYTHON=python3.12   PYTEST_ARGS="-n 4 -k modes"   FULL=1 (whole benchmarks)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n 2 --dist worksteal
BENCHMARKS ?= exchange overhead startup
RESULTS := benchmarks/results
# Where the random scripts of `make slow` begin: others every time, unless it is given.
PACELINE_SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
PACELINE_SEED := $(PACELINE_SEED)
SEEDS ?= 0-1999
CAP ?= 2000
OPTIONS ?= 2

# The first interpreter that is new enough and can make a virtual environment.
FIND_PYTHON = for p in $${PYTHON:-python3.13 python3.12 python3.11 python3}; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$p"; break; }; done || true
export PYTHON

.PHONY: help setup demo examples test check bench chaos explore soak browser gpu hosts integrations slow clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s  %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.dev ## make .venv with everything for running, testing and checking

demo: $(VENV)/.dev ## train a small CNN with 2 servers and 2 workers
	@$(BIN)/paceline run --workers 2 --servers 2 --mode bsp examples/digits.py

examples: $(VENV)/.vision ## every example alone, in bsp and in asp, for 20 steps on synthetic data
	$(BIN)/python -m pytest -m 'examples and not slow' tests/examples

test: check ## check, then the fast test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench ## compare with the peers (quick; FULL=1 for the figures in docs/benchmarks.md)
	@mkdir -p $(RESULTS); failed=; \
	for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name $(if $(FULL),,--quick) --json $(RESULTS)/$$name.json \
			|| failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

chaos: $(VENV)/.dev ## tests that kill, stop and starve real processes, then the fault matrix (FULL=1: its whole length)
	$(BIN)/python -m pytest -m chaos
	$(BIN)/python -m benchmarks.chaos $(if $(FULL),,--quick --minutes 0.5)

explore: $(VENV)/.dev ## every order of messages and deaths of small worlds (CAP=2000 states each, OPTIONS=2 unusual at once)
	$(BIN)/python -m tests.explorer --cap $(CAP) --options $(OPTIONS)

soak: $(VENV)/.dev ## 2,000 random histories of faults, for a night (SEEDS=0-1999)
	$(BIN)/python -m tests.histories --seeds $(SEEDS)

browser: $(VENV)/.dev ## the report in headless Chromium; installs Debian's if there is none; pictures in artifacts/
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
		|| { sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; $$sudo apt-get update && $$sudo apt-get install -y chromium; }
	PACELINE_ARTIFACTS=artifacts $(BIN)/python -m pytest -m browser tests/browser

gpu: $(VENV)/.dev ## tests that need a CUDA device; skips them where there is none
	$(BIN)/python -m pytest -m gpu -rs

integrations: $(VENV)/.dev ## Lightning, transformers and a notebook, with the real libraries; installs them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lightning,transformers,notebook]'
	$(BIN)/python -m pytest -m integrations -rs

hosts: $(VENV)/.dev ## runs on two and three hosts, which are network namespaces; skips them where there is no root
	$(BIN)/python -m pytest -m hosts -rs

slow: $(VENV)/.dev ## longer tests, among them 10,000 random scripts (PACELINE_SEED=n repeats); failing ones in artifacts/
	@echo "make slow: PACELINE_SEED=$(PACELINE_SEED)"
	PACELINE_SEED=$(PACELINE_SEED) PACELINE_ARTIFACTS=artifacts $(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

clean: ## back to a fresh clone; runs/ and benchmarks/results/ stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.dev: pyproject.toml
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "make setup: no Python 3.11 or newer with the venv module among:" \
			"$${PYTHON:-python3.13 python3.12 python3.11 python3}." >&2; \
		echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv)" \
			"or name it: make setup PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	echo "make setup: installing Paceline and its tools into $(VENV) with $$python;" \
		"PyTorch is large, so the first time takes a few minutes."; \
	[ -x $(BIN)/pip ] || "$$python" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'; \
	touch $@

$(VENV)/.vision: $(VENV)/.dev
	@echo "make examples: installing torchvision into $(VENV)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[vision]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "make bench: installing what the benchmarks compare with (Ray, Open MPI, torchft, torchvision) into $(VENV)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@
