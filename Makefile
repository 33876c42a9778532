# Everything a person or a CI machine runs. Needs python3 (>= 3.10), make and git; the rest goes into $(VENV).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# The exact torch to install, e.g. `make test TORCH=torch==2.6.0`.
TORCH ?= $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
PIP_ARGS ?=
NPROC ?= 2
# Test processes side by side. Most tests wait, for processes to start and to end.
JOBS ?= 2
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(notdir $(PYTHON))-$(subst =,-,$(TORCH))
DOCS_STAMP := $(VENV)/.stamp-docs-$(notdir $(PYTHON))-$(subst =,-,$(TORCH))
RUN := env OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# The tests of a file share processes and set-ups, so they stay together; and in their order, which mixes long and short.
PYTEST := $(RUN) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test soak lint types docs bench format clean

help: ## what can be made
	@grep -hE '^[a-z]+:.*## ' Makefile | sed 's/:.*## /|/' | while IFS='|' read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done
	@echo 'Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) NPROC=$(NPROC) JOBS=$(JOBS) PIP_ARGS, DEMO_ARGS, TEST_ARGS, BENCH_ARGS'

setup: $(STAMP) ## the virtual environment, once, and again when the pins change

demo: $(STAMP) ## train on two ranks: fixed, sorted and online batches (DEMO_ARGS=--quick: shorter)
	$(RUN) $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/finetune.py $(DEMO_ARGS)

test: $(STAMP) ## all tests but the soak
	$(PYTEST) $(TEST_ARGS)

soak: $(STAMP) ## the long tests
	$(PYTEST) -m soak $(TEST_ARGS)

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy --strict odb

docs: $(DOCS_STAMP) ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'docs: site/index.html'

bench: $(STAMP) ## the benchmarks
	$(RUN) $(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## remove the environment and all that was built
	rm -rf '$(VENV)' site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Another torch brings its own pins of a few packages, so that ours of the same packages give way.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'set-up: $(PYTHON) is missing or older than 3.10; say which to use: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'set-up: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@version() { "$$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || echo none; }; \
	if [ "$$(version $(BIN)/python)" != "$$(version $(PYTHON))" ]; then \
		echo 'set-up: $(VENV), $(shell $(PYTHON) --version 2>&1)'; $(PYTHON) -m venv --clear '$(VENV)'; fi
	@rm -f $(VENV)/.stamp-*
	@{ grep -vE "^(torch|sympy|triton)==" constraints.txt; echo '$(TORCH)'; \
		if grep -qxF '$(TORCH)' constraints.txt; then grep -E "^sympy==" constraints.txt; fi; } > $(VENV)/constraints.txt
	@install() { echo "set-up: pip install $$*"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off $(PIP_ARGS) "$$@" > $(VENV)/pip.log 2>&1 || \
			{ cat $(VENV)/pip.log >&2; exit 1; }; }; \
	install --upgrade pip; \
	install -c $(VENV)/constraints.txt '$(TORCH)'; \
	install -c $(VENV)/constraints.txt -e '.[dev,demo,trainers]'
	@touch '$@'

$(DOCS_STAMP): $(STAMP)
	@echo 'set-up: pip install .[docs]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
		-c $(VENV)/constraints.txt -e '.[docs]' > $(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log >&2; exit 1; }
	@touch '$@'
