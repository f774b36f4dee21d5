# Every command works in a fresh clone: whatever needs the environment makes it first.
# Nothing is installed outside the checkout's .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/install.log
PIP := python -m pip install --disable-pip-version-check --no-input --retries 2 \
	-c constraints.txt
# torch and its neighbours publish wheels for these, at the versions of constraints.txt.
SUPPORTED := 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
SMALLER_TORCH := on Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu fetches a smaller torch

# Which sample of the tests `make test` runs where it knows no commit that passed: another one each
# week, the same for all who test in it, so that what passes here is what will be asked elsewhere.
ONE_IN ?= 2
SEED ?= $(shell date -u +%G-W%V)

# Tests run in two to four processes of one thread each, so that they never fight over the cores.
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses=4 --dist=worksteal
# The tests that need the documentation's tools: without these `make test` skips them. They run
# without conftest, which would first measure the machine.
PAGE_TESTS := tests/benchmarks/test_architectures.py::test_the_page_shows_what_was_seen \
	tests/benchmarks/test_plan_truth.py::test_the_page_shows_every_recipe_that_ran

.PHONY: help demo test test-rest test-more test-all test-avx2 test-browser lint format types imports docs wheel \
	wheel-check promises benchmarks matrix fuzz install clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: install ## train a small code model, adapt it with LoRA under a budget, show the report
	@env -u OMP_NUM_THREADS $(BIN)/modicum demo

test: install ## the tests that changes since the last commit that passed can reach; else a sample
	@$(PYTEST) --sample=$(SEED) --since-green

test-rest: install ## the tests that the sample leaves out
	@$(PYTEST) --rest-of=$(SEED)

test-more: install ## of what the sample leaves out a seeded half, or one in ONE_IN
	@$(PYTEST) --rest-of=$(SEED) --one-in=$(ONE_IN)

test-all: install ## every test: about two hours on two cores
	@$(PYTEST)

# What a kernel takes in addition to its result is another amount on processors without AVX-512, and
# the forecasts must hold there too.
test-avx2: install ## the forecasts' tests on the kernels of older x86 processors
	@ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) \
		--in-process tests/planner tests/models/test_ledger.py tests/models/test_convnet_ledger.py tests/memory \
		tests/core/machine/test_memory.py

test-browser: install ## the report's page in Chromium, if it is installed; a minute
	@if scripts/find_chromium.sh; then $(BIN)/python -m pytest -q tests/browser; fi

lint: install ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: install ## rewrite the code as ruff formats it
	@$(BIN)/ruff check --fix --exit-zero --quiet
	@$(BIN)/ruff format

types: install ## mypy
	@$(BIN)/mypy

imports: install ## who may import whom
	@$(BIN)/lint-imports

docs: $(VENV)/.docs ## build the documentation into site/, and test its generated pages
	@echo "Building the pages: about a minute"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python -m pytest -q --noconftest $(PAGE_TESTS)
	@echo "site/index.html"

wheel: install ## build the wheel into dist/
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > $(VENV)/wheel.log 2>&1 \
		|| { cat $(VENV)/wheel.log; exit 1; }
	@ls dist/*.whl

wheel-check: wheel ## install the wheel elsewhere: one class alone, then three steps of its recipe
	@set -e; elsewhere=$$(mktemp -d); trap 'rm -rf "$$elsewhere"' EXIT; \
	echo "Installing the wheel outside the checkout, first without extras"; \
	$(BIN)/python -m venv "$$elsewhere/.venv"; \
	install() { "$$elsewhere"/.venv/bin/$(PIP) "$$1" > $(VENV)/wheel.log 2>&1 \
		|| { tail -n 15 $(VENV)/wheel.log; exit 1; }; }; \
	install "$$(echo $$PWD/dist/*.whl)"; \
	awk '/^```python/ {on = 1; next} /^```/ {on = 0} on' README.md > "$$elsewhere/ten_lines.py"; \
	(cd "$$elsewhere" && .venv/bin/python ten_lines.py && test -s adapter/adapter_config.json); \
	echo "The thin install runs README's ten lines."; \
	install "$$(echo $$PWD/dist/*.whl)[cli]"; \
	cd "$$elsewhere"; \
	.venv/bin/modicum train demo-pretrain --out run --set training.steps=3 --set data.limit=1MB; \
	grep -q '"status": "finished"' run/run.json; \
	test "$$(wc -l < run/metrics.jsonl)" -eq 3; \
	echo "The wheel trains outside the checkout."

promises: install ## check the promises of the README, reading what takes long; LONG=1 runs that too
	@env -u OMP_NUM_THREADS $(BIN)/modicum promises $(if $(LONG),--long)

benchmarks: install ## side by side with peers; a while
	@for name in startup equality kill lora_step trainer prediction; do \
		env -u OMP_NUM_THREADS $(BIN)/python benchmarks/$$name.py || exit; \
	done

matrix: install ## the demo and some tests under up to twenty changes; two hours
	@env -u OMP_NUM_THREADS $(BIN)/python benchmarks/matrix.py

fuzz: install ## spoilt inputs of all kinds, ten minutes, and adapters' folders: no stack trace, no hang, one message
	@env -u OMP_NUM_THREADS $(BIN)/python benchmarks/fuzz.py --write
	@$(BIN)/python benchmarks/fuzz_adapters.py --write

install: $(VENV)/.installed

# The build backend comes first, because the last line builds without isolation: so nothing is
# fetched that constraints.txt does not pin.
$(VENV)/.installed: pyproject.toml constraints.txt
	@python=; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
		if "$$candidate" -c $(SUPPORTED) 2> /dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "modicum needs Python 3.11 to 3.14, and none is on the PATH" \
			"(python3 is $$(python3 --version 2>&1 | tail -n 1))."; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(firstword $(MAKECMDGOALS))"; \
		exit 1; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
		echo "Making $(VENV) with $$("$$python" --version)"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV) || { \
			echo "Could not make a virtual environment; on Debian and Ubuntu install python3-venv."; \
			rm -rf $(VENV); exit 1; }; \
	fi
	@echo "Installing PyTorch and the rest of constraints.txt: a few minutes, once (log: $(LOG))"
	@: > $(LOG)
	@$(BIN)/python scripts/find_torch.py $(or $(firstword $(MAKECMDGOALS)),install) $(LOG) $(BIN)/$(PIP)
	@$(call pip,1 of 2: PyTorch,$(BIN)/$(PIP) torch hatchling)
	@$(call pip,2 of 2: modicum and what it needs,$(BIN)/$(PIP) --no-build-isolation --editable '.[dev]')
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo "Installing the documentation's tools (log: $(LOG))"
	@$(call pip,the documentation's tools,$(BIN)/$(PIP) --no-build-isolation --editable '.[docs]')
	@touch $@

# Run pip into the log, as a stage of this name; when it fails, say why in a sentence where that can
# be known.
define pip
$(BIN)/python scripts/install_stage.py "$(1)" $(LOG) $(2) || { \
	if grep -qE 'NewConnectionError|ConnectTimeout|ProxyError|name resolution|Network is unreachable' \
		$(LOG); \
	then echo "The installation needs the network: pip could not reach its package index."; \
	elif grep -q 'No space left' $(LOG); then echo "The disk is full; $(SMALLER_TORCH)."; \
	else tail -n 15 $(LOG); echo "pip failed; the lines above are the end of its log."; fi; \
	echo "All of it is in $(LOG). The same command again resumes from there."; exit 1; }
endef

clean: ## remove what was built; keeps .venv and the run folders
	@rm -rf .cache build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
