# Each target sets up what it needs (.ci/setup.sh) and runs it; nothing has to be installed by hand first.
#   STACK        local (Apache Kafka + redis-server), embedded (wheels only), docker, external
#   ARGS         passed on to the demo, e.g. make demo ARGS="--stack local"
#   PYTEST_ARGS  passed on to pytest

STACK ?= local
ARGS ?=
PYTEST_ARGS ?=
BIN := .venv/bin
TESTS := STREAMSCHED_TEST_STACK=$(STACK) $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-train chaos soak sim-forever lint format bench constraints services clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/.embedded  ## Schedule a workload end to end on this machine, no Docker or Java needed
	@$(BIN)/streamsched demo $(ARGS)

test: .venv/.dev services  ## All tests but the slow ones (STACK=embedded: without Java and redis-server)
	@$(TESTS) -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/.dev services  ## The tests that take over a minute
	@$(TESTS) -m slow $(PYTEST_ARGS)

test-train: .venv/.train  ## The tests of training, which need torch (installed once, some GB)
	@STREAMSCHED_TRAIN_TESTS=1 $(BIN)/pytest tests/train $(PYTEST_ARGS)

chaos: .venv/.dev services  ## The long chaos test (10 min): kill workers, broker and Redis, check that no promise breaks
	@STREAMSCHED_CHAOS=long $(TESTS) tests/integration/test_chaos.py $(PYTEST_ARGS)

soak: .venv/.dev services  ## A million jobs through one worker (hours): does memory stay flat? (SOAK_JOBS=100000)
	@STREAMSCHED_SOAK_JOBS=$(or $(SOAK_JOBS),1000000) $(BIN)/python -m benchmarks soak

sim-forever: .venv/.dev  ## Simulate faults with fresh seeds until one breaks a promise (ARGS="--seed N" for one)
	@$(BIN)/python -m tests.sim.faults $(or $(ARGS),--forever)

lint: .venv/.dev  ## Style, types and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: .venv/.dev  ## Apply the style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: .venv/.dev  ## Measure the hot paths
	@$(BIN)/python -m benchmarks $(ARGS)

constraints:  ## Write constraints.txt anew from the newest versions that pyproject.toml allows
	@rm -rf .venv && : > constraints.txt && .ci/setup.sh venv embedded,dev
	@$(BIN)/pip freeze --exclude-editable --exclude streamsched > constraints.txt

services:
ifeq ($(STACK),local)
	@.ci/setup.sh services
endif

.venv/.embedded: pyproject.toml constraints.txt
	@.ci/setup.sh venv embedded

.venv/.dev: pyproject.toml constraints.txt
	@.ci/setup.sh venv embedded,dev

.venv/.train: .venv/.dev
	@.ci/setup.sh venv embedded,dev,train

clean:  ## Remove the virtual environment, caches and build output
	@rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
