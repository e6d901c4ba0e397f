# `make serve` runs the server, `make test` runs the tests. Both install what they need into .venv.
#   PYTHON=python3.12 make test         uses another interpreter
#   ARGS="--port 9000" make serve       passes flags to the server

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
MACHINES := $(shell uname -m)
# One process more than cores, because tests with servers wait.
PYTEST = $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal
# pip must compile .pyc files, or every import of torch takes four times as long.
PIP := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help serve check test test-long test-clients test-agents test-webui test-browser test-dynamo test-deploy test-nixl test-ray lint types bench stress kernels grid docs dist wheels clean

help:
	@echo "make serve         start the server with the demo model and print a curl command to try"
	@echo "make check         run ruff, mypy and the tests without real processes: two minutes on two cores"
	@echo "make test          run ruff, mypy and all tests but the longest: a quarter of an hour"
	@echo "make test-long     run the longest tests"
	@echo "make test-clients  install third-party clients and run the tests with them"
	@echo "make test-agents   install coding agents (2 GB) and run the tests with them"
	@echo "make test-webui    install Open WebUI (7 GB) and run the tests with it"
	@echo "make test-browser  run the web page's tests, with playwright and the installed Chromium"
	@echo "make test-dynamo   install Dynamo's packages (80 MB) and run the tests with them"
	@echo "make test-deploy   install helm and Kubernetes' schemas (40 MB), and check the Helm chart with them"
	@echo "make test-nixl     install NIXL (460 MB) and run the tests with it"
	@echo "make test-ray      install Ray (250 MB), and run the tests with clusters of several nodes on this machine"
	@echo "make bench         run the benchmarks and write bench/results/"
	@echo "make stress        run the programs that try to break a server and write tests/stress/results/"
	@echo "make kernels       compile the Triton kernels that make dist puts into the wheel"
	@echo "make grid          compile every Triton kernel for every size, type and GPU, and compare with limits.json"
	@echo "make docs          build the documentation as a site in build/site"
	@echo "make dist          build wheel and sdist in dist/, and check them by serving from the installed wheel"
	@echo "make wheels        make dist with wheels for x86-64 and ARM64, one of them by a cross compiler"
	@echo "make clean         remove .venv, the builds and the caches"

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
	$(PYTEST) -n $$((2 * $$(nproc))) -m "not e2e and not exactness and not slow and not long" $(ARGS)  # they wait a lot

test: lint
	$(BIN)/mypy & types=$$!; $(PYTEST) --durations=10 $(ARGS); tests=$$?; wait $$types && exit $$tests

test-long: $(VENV)/.dev
	$(PYTEST) -m "long and not clients and not browser and not ray" --durations=10 $(ARGS)

test-clients: $(VENV)/.dev
	$(PIP) install -r tests/e2e/requirements-clients.txt
	$(PIP) install --no-deps -r tests/e2e/requirements-clients-alone.txt
	if command -v npm; then cd tests/e2e/node && npm ci; else echo "npm is not installed: the tests with Node.js clients are skipped."; fi
	$(BIN)/python -m pytest -m clients -rs $(ARGS)

test-agents: $(VENV)/.dev
	cd tests/e2e/agents && npm install --no-save --ignore-scripts  # npm ci asks for packages of all other systems
	cd tests/e2e/agents && $(abspath $(BIN))/python -m venv .venv && .venv/bin/pip install -r ../requirements-agents.txt
	cd tests/e2e/agents && $(abspath $(BIN))/python -m venv .venv-aider && .venv-aider/bin/pip install aider-chat
	$(BIN)/python -m pytest -m clients -rs tests/e2e/test_agents.py $(ARGS)

test-webui: $(VENV)/.dev
	cd tests/e2e/agents && $(abspath $(BIN))/python -m venv .venv-webui && .venv-webui/bin/pip install open-webui==0.12.4
	$(BIN)/python -m pytest -m clients -rs tests/e2e/test_open_webui.py $(ARGS)

test-dynamo: $(VENV)/.dev
	$(PIP) install --no-deps -r tests/client/requirements-dynamo.txt
	$(BIN)/python -P -m pytest -m dynamo -rs $(ARGS)

test-browser: $(VENV)/.dev
	$(PIP) install -r tests/e2e/requirements-browser.txt
	$(BIN)/python -m pytest -m browser $(ARGS)

test-deploy: $(VENV)/.dev
	$(PIP) install -r tests/requirements-deploy.txt
	$(BIN)/python -m pytest -rs tests/test_chart.py $(ARGS)

test-nixl: $(VENV)/.dev
	$(PIP) install -e '.[dev,nixl]'
	$(BIN)/python -m pytest -m "" -k nixl -rs tests/engine/kv_connector tests/e2e/test_roles.py $(ARGS)

test-ray: $(VENV)/.dev
	$(PIP) install -e '.[dev,ray]'
	$(BIN)/python -P -m pytest -m ray -rs tests/ray_cluster $(ARGS)

bench: $(VENV)/.dev
	for bench in serve serve.frontend serve.engines serve.route serve.choice serve.roles serve.startup serve.metrics \
		engine.offline engine.invariance engine.scheduler engine.long_prompt engine.policies engine.kv_tiers \
		engine.accuracy engine.speculation engine.embeddings engine.sums engine.stages engine.parallel \
		engine.tokenizer; do $(BIN)/python -m pagewire.bench.$$bench || exit; done

stress: $(VENV)/.dev
	for program in hostile hostile_models overload abuse leak chaos; do \
		$(BIN)/python -m pagewire.tests.stress.$$program || exit; done

kernels: $(VENV)/.dev
	for arch in 80 89 90 100 120; do \
		$(BIN)/python -m pagewire.kernels.triton.compile --ship kernels/triton/shipped/sm_$$arch.zip --arch $$arch || exit; done

grid: $(VENV)/.dev
	$(BIN)/python -m pagewire.kernels.triton.grid $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/python -m pagewire.tools.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pagewire.tools.wheels dist $(MACHINES)
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pagewire.tools.check_dist dist

wheels: MACHINES = x86_64 aarch64
wheels: dist

clean:
	rm -rf $(VENV) build dist kernels/triton/shipped *.egg-info .mypy_cache .pytest_cache .ruff_cache
