# Every chore has one command here; continuous integration runs the same ones. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
SOURCES := streamdiff training tests benchmarks examples deploy integrations
# What the quick loop leaves out; `make test` runs everything but the soak tests.
QUICK := not slow and not browser and not packaging and not interop
# They start a browser or a third-party client, which want most of the machine: three files of them run at a time, when
# everything else, which shares the cores, has ended.
ALONE := browser or interop
# No other folder has such tests (tests/rules/test_markers.py), and need not be looked through for them.
ALONE_IN := tests/browser tests/interop
# All of the first are of that kind, and take a second to import in every worker.
ASIDE := --ignore=tests/browser
# More than there are cores: many tests wait, for processes to start and for video to play.
WORKERS := $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 2 )))
# Where ARGS choose tests, all of them may be of one kind.
NONE := $(if $(ARGS),|| [ $$? -eq 5 ],)

# In continuous integration one unsteady test is not to hide what the others say: a test that fails is tried once more,
# and the summary names it (RERUN). Fix the test then, or what it found.
# Without that, a test whose process ended (tests/conftest.py) is not tried again by those that take over its work.
RETRY := $(if $(CI),--reruns 1 --rerun-show-tracebacks -raR,--reruns 0)

# An interpreter given on the command line or in the environment reaches tools/environment.sh this way.
export VENV
# Modules stay compiled, whatever the environment says: hundreds of processes of the tests read the same ones.
unexport PYTHONDONTWRITEBYTECODE
ifdef PYTHON
export PYTHON
endif

.PHONY: help serve test side-by-side alone check fast soak bench format lint types reference docs clean distclean environment test-environment browser

help: ## list these commands
	@echo "streamdiff: a prompt becomes live video in your browser"
	@echo
	@sed -nE 's/^([a-z]+):.*## (.*)$$/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|' 2>/dev/null \
	    || sed -nE 's/^([a-z]+):.*## (.*)$$/  make \1: \2/p' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  Options of a command go into ARGS: make serve ARGS="--port 9000 --prompt \"a blue star\""'
	@echo '  Another interpreter: make PYTHON=python3.12 serve'

serve: environment ## start the server with the embedded model and open a browser
	@exec $(BIN)/streamdiff serve $(ARGS)

test: test-environment browser lint ## everything that takes minutes: style, types, unit, browser, wheel tests
	@$(MAKE) --jobs 2 types side-by-side
	@$(MAKE) alone

side-by-side:
	@echo "==> tests, side by side"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --no-skips $(RETRY) --durations=15 -q -n $(WORKERS) --dist loadgroup $(if $(ARGS),,$(ASIDE)) -m "not ($(ALONE))" $(ARGS) $(NONE)

alone:
	@echo "==> tests with browsers and third-party clients"
	@without="$$(tools/interop.sh)" && \
	    $(BIN)/python -m pytest --no-skips $(RETRY) --durations=15 -n 3 --dist loadfile -m "($(ALONE))$${without:+ and $$without}" $(or $(ARGS),$(ALONE_IN)) $(NONE) && \
	    echo "==> all tests passed$${without:+ but those left out here, see above: $$without}"

check: test-environment lint ## the quick loop: style, types, fast tests
	@$(MAKE) --jobs 2 types fast

fast:
	@echo "==> fast tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(if $(ARGS),,$(ASIDE)) -m "$(QUICK)" $(ARGS)

soak: test-environment browser ## what takes hours: long streams, every number of ranks; writes benchmarks/results/soak.json
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak --durations=15 $(ARGS)

bench: test-environment browser ## measure the live stream in a headless browser and print the figures
	@$(BIN)/python -m benchmarks.live_browser $(ARGS)

reference: environment ## write docs/settings.md and docs/api.md from the code
	@$(BIN)/python tools/reference.py

format: test-environment ## rewrite the sources in the house style
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

lint:
	@echo "==> style"
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

types:
	@echo "==> types"
	@$(BIN)/mypy

docs: environment ## build the documentation as a site, in build/site
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(BIN)/python -m pip install --quiet 'mkdocs>=1.6,<2'
	@$(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

clean: ## remove what builds and tests leave behind
	@rm -rf build dist out ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "==> clean ($(VENV) is kept; make distclean removes it too)"

distclean: clean ## that, and the environment
	@if [[ -f $(VENV)/pyvenv.cfg ]]; then rm -rf "$(VENV)"; fi
	@rm -rf .venv-aiperf

environment:
	@tools/environment.sh run

test-environment:
	@tools/environment.sh test

browser:
	@tools/browser.sh
