# `make lab` opens the start page of the course; `make test` tests all but what is slow; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
LOCKED := --no-deps --require-hashes -r requirements.lock
WORKBENCH := -c constraints.txt -e '.[notebooks,tensorboard,exporters,trace,formats,docs,dev]'
UV := 0.13.9
# packages of which little or nothing is imported: what is, Python compiles then
RARELY := pip|setuptools|mypy|mypyc|moto|sympy|networkx|debugpy|pytorch_lightning|lightning_fabric|aiohttp|fastapi|mlflow|databricks|wandb|opentelemetry|google|fontTools|wcwidth|backrefs|prompt_toolkit|jedi|torchgen
# an environment of its own for the tools that look at the other one
AUDIT := $(VENV)/audit/.installed
# a folder of its own for timm: it needs torchvision, and where that is built for another torch, nor could transformers be imported
TIMM := $(VENV)/timm/.installed
ARGS ?=
# pytest's 5 means that no test was chosen: where ARGS choose some, those may all be in the other half
CHOSEN = $(if $(ARGS),|| [ $$? = 5 ])
.NOTPARALLEL:
# what fails is tried once more, since others may compute on the machine; the summary names it (RERUN) and says why
AGAIN := --reruns 1 --reruns-delay 1 --rerun-show-tracebacks
# many tests wait, for ranks or a deadline: three files at a time keep two cores busy; tests/conftest.py says which files come first
THREE := -n 3 --dist loadfile --no-loadscope-reorder
# each has a JupyterLab, a Chromium and a page of its own: beside other tests, which take longer anyway, one is enough
AT_ONCE = -n 2 --maxschedchunk 1
# a shell lets Ctrl-C pass by what it starts beside itself
INTERRUPTED := $(shell env --default-signal=INT true 2> /dev/null && echo env --default-signal=INT)
# the slow ones wait more
FOUR := -n 4 --dist loadfile --no-loadscope-reorder
# files in which some tests have a mark: to collect them all takes seconds
MARKED = $(if $(ARGS),,$$(grep -rlE 'mark\.($(1))\b' --include='test_*.py' tests))
# nbval takes seconds to import
PYTEST = $(BIN)/python -m pytest -p no:nbval
# the Python that the command line names, else the environment's, else any
GIVEN = $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)))
CAN_TEST = @"$(GIVEN)" -c 'import torch, numpy, msgspec, scipy, pandas, matplotlib, PIL, pytest' || { \
  echo 'The last line above names a package that $(GIVEN) lacks, and the tests need.'; \
  echo 'Try: $(GIVEN) -m pip install -e . pytest, or another Python: make $@ PYTHON=/path/to/python, or make setup'; exit 1; }
test test-slow test-core unit unit-browser together alone slow slow-alone notebooks slow-notebooks browser refresh bench coverage: export OMP_NUM_THREADS = 1
# where it is set, as in many containers, each of a thousand processes compiles all that it imports
export PYTHONDONTWRITEBYTECODE =
export KINETO_LOG_LEVEL ?= 6

.PHONY: help setup lab docs test test-slow lint lint-docs architecture unit unit-browser together alone slow slow-alone notebooks slow-notebooks browser test-gpu test-core gpu-check audit lock student refresh bench coverage format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(COMPILED) ## create .venv with everything (quick if it exists)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo 'Everything is in $(VENV). Next: $(BIN)/workbench --help or make lab for the course in JupyterLab')

$(STAMP): pyproject.toml constraints.txt requirements.lock
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. Debian: apt-get install python3 python3-venv; or make PYTHON=/path/to/python3.11"; exit 1; }
	@echo 'setup: an environment in $(VENV), with $(PYTHON)'
	@"$(PYTHON)" -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "This Python cannot make virtual environments. Debian: apt-get install python3-venv"; exit 1; }
	@# torch, which the lock leaves to pip, beside the rest, which uv installs in seconds and pip, where uv cannot, in a minute
	@$(PIP) --no-deps -c constraints.txt torch & torch=$$!; trap 'kill $$torch 2> /dev/null; exit 130' INT TERM; \
	  echo 'setup: torch, and the $(shell grep -c == requirements.lock) packages of requirements.lock: a few minutes, 2.4 GB'; \
	  { $(PIP) uv==$(UV) && $(BIN)/uv pip install --quiet --python $(BIN)/python $(LOCKED); } || \
	  { echo 'setup: uv could not install them (it says why above), so pip does it: some minutes more'; $(PIP) $(LOCKED); } || \
	  { echo 'setup: pip could not install them either. Is there a network, and room on the disk? Then try again: make setup'; \
	    kill $$torch 2> /dev/null || true; exit 1; }; \
	  echo 'setup: the packages are there; waiting for torch'; \
	  wait $$torch || { echo 'setup: pip could not install torch. Is there a network, and room on the disk? Then try again: make setup'; exit 1; }
	@echo 'setup: the workbench itself'
	@# what it needs is there, as uv sees at once; where something is missing, such as what torch for a GPU needs, it is installed
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation $(WORKBENCH) || $(PIP) $(WORKBENCH)
	@touch $@

# on all cores, and without what nobody imports: an installer compiles on one core, or not at all
$(COMPILED): $(STAMP)
	@echo 'setup: compiling what is imported most, on all cores: about a minute'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/|transformers/models/|torch/testing/|/($(RARELY))/' $(VENV)/lib || true
	@touch $@

lab: setup ## open JupyterLab on the start page of the course (ARGS=--no-browser prints the URL instead)
	@echo 'lab: trusting the notebooks, then opening JupyterLab'
	@$(BIN)/jupyter trust notebooks/*.ipynb > /dev/null
	$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=notebooks \
	  --LabApp.default_url=/lab/tree/00_start_here.ipynb $(ARGS)

docs: setup ## build the documentation as a site, build/docs/site/index.html; broken links are errors
	$(BIN)/python docs/make_site.py $(ARGS)

test: lint-docs unit-browser alone notebooks ## run all tests but the slow ones (CI runs this, then test-slow)
	@echo "all of make test passed"

test-slow: slow slow-alone slow-notebooks ## run the tests that judge statistics or take minutes
	@echo "all of make test-slow passed"

lint: $(STAMP) ## run ruff (code and notebooks) and mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lint-docs: $(STAMP) ## lint, and build the documentation at the same time
	@echo 'lint-docs: ruff and mypy, and beside them the documentation, whose output follows: a minute or two'
	@mkdir -p build; $(INTERRUPTED) $(MAKE) --no-print-directory docs > build/docs.log 2>&1 & docs=$$!; \
	  $(MAKE) --no-print-directory lint && linted=0 || linted=$$?; \
	  wait $$docs && built=0 || built=$$?; cat build/docs.log; exit $$((linted || built))

architecture: ## print packages, files, import cycles and upward imports, and every violation of an architecture rule
	@$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m tests.architecture.rules

unit: together alone ## run the library, process and documentation tests

unit-browser: setup ## run the unit tests that can run in parallel, and the browser tests at the same time
	@echo 'unit-browser: the tests, and beside them those in a browser, whose output follows: many minutes'
	@mkdir -p build; $(INTERRUPTED) $(MAKE) --no-print-directory browser AT_ONCE= > build/browser.log 2>&1 & browser=$$!; \
	  $(MAKE) --no-print-directory together && unit=0 || unit=$$?; \
	  wait $$browser && shown=0 || shown=$$?; cat build/browser.log; exit $$((unit || shown))

together: setup ## run the unit tests that can run in parallel
	$(PYTEST) -m "not gpu and not browser and not alone and not slow" $(if $(ARGS),,--ignore=tests/browser --ignore=tests/gpu) $(THREE) $(AGAIN) --durations=10 $(ARGS) $(CHOSEN)

alone: setup ## run the unit tests that judge times, with nothing else running
	@echo 'alone: the tests that judge times'
	$(PYTEST) -m "alone and not slow" $(call MARKED,alone) $(AGAIN) --durations=10 $(ARGS) $(CHOSEN)

slow: setup $(TIMM) ## run the slow tests that can run in parallel
	$(PYTEST) -m "slow and not gpu and not alone" $(call MARKED,slow) $(FOUR) $(AGAIN) --durations=10 $(ARGS) $(CHOSEN)

slow-alone: setup ## run the slow tests that judge times
	$(PYTEST) -m "slow and alone" $(call MARKED,alone) $(AGAIN) --durations=10 $(ARGS) $(CHOSEN)

notebooks: setup ## execute the notebooks and compare what they show (strict nbval)
	@echo 'notebooks: executing them, two at a time'
	$(BIN)/python -m tests.notebooks $(ARGS)

slow-notebooks: setup ## execute the notebooks that take minutes or judge times by experiment
	$(BIN)/python -m tests.notebooks --slow $(ARGS)

browser: setup ## drive JupyterLab in Chromium; screenshots in shots/
	$(PYTEST) -m browser tests/browser $(AT_ONCE) $(AGAIN) $(ARGS) $(CHOSEN)

test-gpu: ## run the tests that need an NVIDIA GPU, with whatever Python has torch (PYTHON=…)
	$(CAN_TEST)
	$(GIVEN) -m pytest -m gpu tests/gpu $(ARGS)

test-core: ## run the tests that need no extra (no Jupyter, no dev tools but pytest), with whatever Python has torch (PYTHON=…)
	$(CAN_TEST)
	$(GIVEN) -m pytest -m "not gpu and not browser and not alone and not slow" $(ARGS)

gpu-check: ## check on an NVIDIA GPU what only a GPU can tell, in about 15 minutes (ARGS="--parts timer,verdicts", PYTHON=…)
	PYTHONPATH=. $(GIVEN) -m benchmarks.gpu_check $(ARGS)

$(TIMM): Makefile constraints.txt
	@$(PIP) --no-deps --upgrade --target $(dir $(TIMM)) timm==1.0.31 torchvision==0.28.0 && touch $@ || \
	  echo 'slow: timm could not be installed (pip says why above): its test is skipped'

$(AUDIT): Makefile
	@"$(PYTHON)" -m venv $(dir $(AUDIT))
	$(dir $(AUDIT))bin/python -m pip install --quiet --disable-pip-version-check --no-compile pip-audit==2.10.1 uv==$(UV)
	@touch $@

audit: $(AUDIT) ## look up known vulnerabilities of what is pinned; fails if there is one, and says so if no database can be reached (ARGS=--strict fails then, too)
	$(dir $(AUDIT))bin/python -m tests.audit $(ARGS)

lock: $(AUDIT) ## update requirements.lock: versions of all packages, with checksums
	$(dir $(AUDIT))bin/python -m tests.lock

student: setup ## copy the notebooks without outputs into build/student (ARGS=--no-solutions takes the solutions out)
	$(BIN)/python -m tests.student $(ARGS)

refresh: setup ## execute the notebooks and store their outputs (then read the diff)
	$(BIN)/python -m tests.refresh $(ARGS)

bench: setup ## run the benchmarks of benchmarks/RESULTS.md, which takes hours (ARGS=--list, ARGS="timer_cost traces")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	PYTHONPATH=. $(BIN)/python -m benchmarks --peers $(VENV)/peers $(ARGS)

coverage: setup ## run the unit tests, and measure their coverage of kernel, guard and ranks
	$(BIN)/python -m coverage run -m pytest -m "not gpu and not browser" && $(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report

format: setup ## format everything with ruff
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean: ## remove the environment and the files that tools left
	rm -rf $(VENV) shots .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* *.egg-info
