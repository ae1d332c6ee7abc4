# Everything a contributor runs. `make help` lists it; CONTRIBUTING.md says when.
.DEFAULT_GOAL := help
.PHONY: help demo test test-clients fuzz quick format bench clean
.DELETE_ON_ERROR:

BIN := .venv/bin
MODEL ?= smollm2-135m-instruct
# Each process makes its own engines and holds gigabytes; files stay whole, for the sake of what their tests share.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile

help: ## list what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp for each set of extras: nothing is installed again until pyproject.toml changes.
.venv/.installed-demo: pyproject.toml .ci/venv
	@.ci/venv demo
	@touch $@

.venv/.installed-dev: pyproject.toml .ci/venv
	@.ci/venv demo,dev
	@touch $@ .venv/.installed-demo

.venv/.installed-aot: .venv/.installed-dev .ci/compilers
	@$(BIN)/python .ci/compilers
	@touch $@

.venv-clients/.installed: pyproject.toml .ci/clients tests/clients/package.json .venv/.installed-dev
	@$(BIN)/python .ci/clients
	@touch $@

demo: .venv/.installed-demo ## install, then answer a few prompts with a small real model
	$(BIN)/python -m jaxserve.offline --model $(MODEL) --demo

test: .venv/.installed-aot ## install what is missing, then check format, lint, types and run every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(PARALLEL)

test-clients: .venv-clients/.installed ## drive a running server with other people's clients, in an environment of their own
	.venv-clients/bin/pytest -c tests/clients/pytest.ini tests/clients

fuzz: .venv-clients/.installed ## five minutes of requests, right and wrong ones, made out of /openapi.json
	JAXSERVE_FUZZ_SECONDS=300 JAXSERVE_FUZZ_SEED=$$(date +%s) .venv-clients/bin/pytest -c tests/clients/pytest.ini -s tests/clients/test_fuzz.py

quick: .venv/.installed-dev ## the loop while working, under 90 seconds: no slow tests, fewer examples
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest -q $(PARALLEL) -m 'not slow'

format: .venv/.installed-dev ## rewrite the code as the linter wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed-dev ## measure throughput on the four workloads; BENCH='--help' shows more
	$(BIN)/python -m bench.offline --model $(MODEL) $(BENCH)

clean: ## remove the environment, caches and build products
	rm -rf .venv .venv-clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
