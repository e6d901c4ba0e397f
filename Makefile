# Two commands: `make serve` answers, `make test` proves. Both make what they need in .venv.
#   PYTHON=python3.12 make test    another interpreter        ARGS="--port 9000" make serve    flags for the server

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal
# pip's own compilation of .pyc files must not be switched off, or every import of torch takes four times as long.
PIP := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help serve check test test-long test-clients test-agents test-browser lint types bench kernels dist clean

help:
	@echo "make serve   start the server on the demo model and print a curl line to try"
	@echo "make check   ruff, mypy and the tests without real processes, for the inner loop: two minutes on two cores"
	@echo "make test    ruff, mypy and the tests that everybody should see pass: six minutes"
	@echo "make test-long     the tests that take longest: ten minutes"
	@echo "make test-clients  the tests with other people's clients, which it installs"
	@echo "make test-agents   the tests with coding agents, which it installs: 640 MB"
	@echo "make test-browser  the web page's tests, with playwright and the machine's Chromium"
	@echo "make bench   the benchmarks, into bench/results/"
	@echo "make kernels compiled Triton kernels, which make dist then puts into the wheel"
	@echo "make dist    wheel and sdist, into dist/"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(BIN)/python
	$(PIP) install --progress-bar on -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) install --progress-bar on -e '.[dev]'
	@touch $@ $(VENV)/.serve

serve: $(VENV)/.serve
	@exec $(BIN)/pagewire serve $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types
	$(PYTEST) -m "not e2e and not exactness and not slow and not long" $(ARGS)

test: lint types
	$(PYTEST) --durations=10 $(ARGS)

test-long: $(VENV)/.dev
	$(PYTEST) -m "long and not clients and not browser" --durations=10 $(ARGS)

test-clients: $(VENV)/.dev
	$(PIP) install -r tests/e2e/requirements-clients.txt
	$(PIP) install --no-deps -r tests/e2e/requirements-clients-alone.txt
	if command -v npm; then cd tests/e2e/node && npm ci; else echo "There is no npm: its clients are skipped."; fi
	$(BIN)/python -m pytest -m clients -rs $(ARGS)

test-agents: $(VENV)/.dev
	cd tests/e2e/agents && npm ci --ignore-scripts
	$(BIN)/python -m pytest -m clients -rs tests/e2e/test_agents.py $(ARGS)

test-browser: $(VENV)/.dev
	$(PIP) install -r tests/e2e/requirements-browser.txt
	$(BIN)/python -m pytest -m browser $(ARGS)

bench: $(VENV)/.dev
	for bench in offline invariance serve frontend route startup scheduler long_prompt policies kv_tiers accuracy speculation metrics embeddings overload abuse leak chaos; do $(BIN)/python -m pagewire.bench.$$bench || exit; done

kernels: $(VENV)/.dev
	for arch in 80 89 90; do \
		$(BIN)/python -m pagewire.kernels.triton.compile --ship kernels/triton/shipped/sm_$$arch.zip --arch $$arch || exit; done

dist: $(VENV)/.dev
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) build dist kernels/triton/shipped *.egg-info .mypy_cache .pytest_cache .ruff_cache
