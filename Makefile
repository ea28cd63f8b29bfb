# Every target sets up first and needs nothing else: a fresh clone and Python 3.11 or later.

PYTHON ?= python3
BIN := .venv/bin
# A wheel folder or mirror that pip is configured with is used as it is.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Import once what every process will import, so that its bytecode is there (pip left that out: most of it is never used).
WARM_UP := import atoll.train.engine, atoll.train.elastic, atoll.train.elastic_service, atoll.train.report, torch._dynamo; \
  from transformers import LlamaForCausalLM, GPT2LMHeadModel, OPTForCausalLM, Qwen2ForCausalLM

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format docs newcomer bench bench-dilocox gpu-check chaos clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/.ready  ## make .venv and install everything into it

.venv/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or so, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e ".[dev]"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c "$(WARM_UP)"
	@touch $@

demo: setup  ## train a model with DiLoCo on this machine and compare it with two baselines
	@$(BIN)/atoll demo

test: setup  ## run the tests
	@$(BIN)/python -m pytest -n 2

check: setup  ## formatting, lint, types, the import rule
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_imports.py

format: setup  ## format and mend what can be mended
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## measure speed and memory against plain torch
	@$(BIN)/python benchmarks/inner_loop.py
	@$(BIN)/python benchmarks/sync.py
	@$(BIN)/python benchmarks/memory.py
	@$(BIN)/python benchmarks/compress.py
	@$(BIN)/python benchmarks/plan_evidence.py

bench-dilocox: setup  ## DiLoCoX's throughput table on slowed links (needs root, and a quiet machine)
	@$(BIN)/python benchmarks/dilocox.py

gpu-check: setup  ## what a machine with a GPU must show: a bf16 step, the codes against the CPU, their GB/s
	@$(BIN)/python benchmarks/gpu_check.py

chaos: setup  ## thousands of kills, freezes and flipped bits at random (hours): writes benchmarks/results/reliability.json
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults.chaos

docs: setup  ## build the documentation into runs/site; a broken link is an error
	@$(PIP_INSTALL) -e ".[docs]"
	@$(BIN)/mkdocs build --strict

newcomer: setup  ## time the way of somebody new: the first model, then a second island
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/newcomer.sh

clean:  ## remove what the other targets made
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache
