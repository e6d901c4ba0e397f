# Two commands: `make serve` answers, `make test` proves. Both make what they need in .venv.
#   PYTHON=python3.12 make test    another interpreter        ARGS="--port 9000" make serve    flags for the server

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# pip's own compilation of .pyc files must not be switched off, or every import of torch takes four times as long.
PIP := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help serve check test test-long test-clients test-agents test-browser lint types bench stress kernels docs dist clean

help:
	@echo "make serve   start the server on the demo model and print a curl line to try"
	@echo "make check   ruff, mypy and the tests that take milliseconds, for the inner loop"
	@echo "make test    ruff, mypy and the tests"
	@echo "make test-long     the tests that take longest"
	@echo "make test-clients  the tests with other people's clients, which it installs"
	@echo "make test-agents   the tests with coding agents, which it installs: 640 MB"
	@echo "make test-browser  the web page's tests, with playwright and the machine's Chromium"
	@echo "make bench   the benchmarks, into bench/results/"
	@echo "make stress  the programs that try to break a server, into tests/stress/results/"
	@echo "make kernels compiled Triton kernels, which make dist then puts into the wheel"
	@echo "make docs    the documentation as a site, into build/site"
	@echo "make dist    wheel and sdist, into dist/, and checks them: it installs the wheel and serves with it"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml | $(BIN)/python
	$(PIP) install --progress-bar on -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) install --progress-bar on -e '.[dev]'
	@touch $@ $(VENV)/.serve

$(VENV)/.docs: pyproject.toml $(VENV)/.dev
	$(PIP) install --progress-bar on -e '.[dev,docs]'
	@touch $@

serve: $(VENV)/.serve
	@exec $(BIN)/pagewire serve $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not e2e and not slow and not long" --ignore tests/test_exactness.py \
		--ignore tests/test_families.py --ignore tests/kernels/triton --ignore tests/engine/gpu $(ARGS)

test: lint types
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=10 $(ARGS)

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m long $(ARGS)

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
	for bench in serve serve.frontend serve.route serve.startup serve.metrics engine.offline engine.invariance \
		engine.scheduler engine.long_prompt engine.policies engine.kv_tiers engine.accuracy engine.speculation \
		engine.embeddings; do $(BIN)/python -m pagewire.bench.$$bench || exit; done

stress: $(VENV)/.dev
	for program in hostile hostile_models overload abuse leak chaos; do \
		$(BIN)/python -m pagewire.tests.stress.$$program || exit; done

kernels: $(VENV)/.dev
	for arch in 80 89 90; do \
		$(BIN)/python -m pagewire.kernels.triton.compile --ship kernels/triton/shipped/sm_$$arch.zip --arch $$arch || exit; done

docs: $(VENV)/.docs
	$(BIN)/python -m pagewire.tools.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pagewire.tools.check_dist dist

clean:
	rm -rf $(VENV) build dist kernels/triton/shipped *.egg-info .mypy_cache .pytest_cache .ruff_cache
