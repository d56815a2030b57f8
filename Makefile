# Every target does its own set-up in .venv; it needs Python >= 3.11, pip and make.
# Options: PYTHON=python3.12 (for .venv), PYTEST="-k name -x" and TEST_WORKERS=1 (for tests),
# SOAK_S, SOAK_SEED (for soaks).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm check soak soak-vllm fix clean

PYTHON ?= python3
PYTEST ?=
TEST_WORKERS ?= 3
SOAK_S ?= 600
SOAK_SEED ?=
RUN := .venv/bin/python -m

export PYTHON TEST_WORKERS

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

.venv/.ready: pyproject.toml constraints.txt scripts/set_up.sh
	@scripts/set_up.sh

demo: .venv/.ready ## start prefill, decode and router, chat through them, draw a picture
	@.venv/bin/kvferry demo

test: .venv/.ready ## every test but the long ones and those with real vLLM
	@scripts/run_tests.sh 'not soak and not vllm' $(PYTEST)

test-vllm: .venv/.ready ## the tests with real vLLM, in an environment of its own (3.5 GB, once)
	@scripts/set_up_vllm.sh
	printf '== pytest -m vllm (without soak) %s\n' '$(PYTEST)'
	$(RUN) pytest -q -m 'vllm and not soak' tests/vllm $(PYTEST)

check: .venv/.ready ## lint, format, types, layers, tables, sizes, docs
	@printf '== ruff check\n'
	$(RUN) ruff check .
	printf '== ruff format --check\n'
	$(RUN) ruff format --check .
	printf '== mypy --strict (src, tests, tools)\n'
	$(RUN) mypy
	printf '== import-linter (layers)\n'
	log=$$(mktemp)
	trap 'rm -f "$$log"' EXIT
	.venv/bin/lint-imports > "$$log" 2>&1 || { cat "$$log"; exit 1; }
	grep -E '^Contracts:' "$$log"
	printf '== state tables in docs\n'
	.venv/bin/python scripts/render_state_tables.py --check
	printf '== tables of options in docs\n'
	.venv/bin/python scripts/render_option_tables.py --check
	printf '== pytest tests/architecture (sizes, docs)\n'
	$(RUN) pytest -q tests/architecture

soak: .venv/.ready ## the long tests; SOAK_S=seconds each, SOAK_SEED=number to repeat a run
	@export SOAK_S='$(SOAK_S)' SOAK_SEED="$${SOAK_SEED:-$(or $(SOAK_SEED),$$RANDOM$$RANDOM)}"
	printf '== SOAK_S=%s SOAK_SEED=%s\n' "$$SOAK_S" "$$SOAK_SEED"
	TEST_WORKERS=$${TEST_WORKERS:-2} scripts/run_tests.sh 'soak and not vllm' --timeout "$$(( SOAK_S * 3 + 300 ))" $(PYTEST)

soak-vllm: .venv/.ready ## the long ones with real vLLM; SOAK_S=1800 is about 5,000 requests
	@scripts/set_up_vllm.sh
	export SOAK_S='$(SOAK_S)' SOAK_SEED="$${SOAK_SEED:-$(or $(SOAK_SEED),$$RANDOM$$RANDOM)}"
	printf '== pytest -m "soak and vllm": SOAK_S=%s SOAK_SEED=%s\n' "$$SOAK_S" "$$SOAK_SEED"
	$(RUN) pytest -q -m 'soak and vllm' tests/vllm $(PYTEST)

fix: .venv/.ready ## let ruff repair and format what it can
	@$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean: ## remove .venv and caches
	@rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
