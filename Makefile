# make demo, make test: each sets up what it needs. `make help` lists everything.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ENGINE ?= vllm
MODEL ?= smollm2
# the demo's duration counts from here
BEGIN := $(shell date +%s)
# make the environments with this one; it needs only the standard library
BASE_PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13,$(shell command -v $(name))))
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
# On a CPU one environment can hold both engines; a demo installs only its own. On a GPU their pins exclude each other.
# Relative paths: the checks of the machine run, and can refuse its path, whatever characters that has.
VENV ?= $(if $(filter gpu,$(DEVICE)),.venv-$(ENGINE),.venv)
TEST_VENV ?= $(if $(filter gpu,$(DEVICE)),.venv,$(VENV))
TEST_KIND := test
# of make check: without engines
CHECK_VENV ?= .venv-check
PACKAGE := .build/package
# of make kernels; empty: all of the manifest
ARCHS ?=
# all of them go to build/cubins; `make test` compiles those that differ in more than an element type, and keeps none
KERNELS = --out build/cubins
JOBS ?= $(shell nproc)
TEST_PYTHON = $(abspath $(TEST_VENV)/bin/python)
# safe path: tests that start `python -c` must find the installed package, not the source tree, which has no built library
PYTEST = PYTHONSAFEPATH=1 $(TEST_VENV)/bin/pytest --progress
# of make fuzz
SECONDS ?= 30
SEED ?= 0

.PHONY: help
help:
	@echo "make demo [ENGINE=vllm|sglang]  serve SmolLM2 with this backend, ask it a question, measure it beside the engine's own backend (results/)"
	@echo "     MODEL=DIR                  another model; NUM_PROMPTS=N another load"
	@echo "     PYTHON=...                 an interpreter that has torch and the engine: no environment is made"
	@echo "make check                      before each commit, under 3 minutes: lint, types and the fast tests, without an engine"
	@echo "make test                       everything that CI checks: lint, types, all CPU tests, kernels compiled, both engines serving on the CPU"
	@echo "make kernels                    compile all CUDA kernels into build/cubins (ARCHS=sm_90a: of one arch); pip install ships them"
	@echo "make lint                       ruff, mypy, clang-format, clang-tidy; make format: ruff and clang-format put their layout into the files"
	@echo "make unit, make integration     the two halves of the tests: without a running engine, and with one"
	@echo "make fuzz                       random calls of the API, valid and not; SECONDS=30 of them, SEED=N for others"
	@echo "make releases                   compare the adapters with new releases of the engines, from PyPI: a report in results/releases.md; exit status 1 if something that concerns us changed"
	@echo "make docs                       the documentation site, in .build/site; fails on a broken link"
	@echo "make wheel                      the wheel (manylinux_2_28, all cubins), the source distribution and the wheel of flashinfer_alias/, in dist/; needs nvcc"
	@echo "make clean                      remove build outputs and results; make distclean: the environments too"

.PHONY: demo
ifdef PYTHON
demo: export PYTHONPATH := $(CURDIR)/$(PACKAGE)$(if $(PYTHONPATH),:$(PYTHONPATH))
demo: demo-arguments
	@$(PYTHON) -m integration.environment --python "$$(command -v $(PYTHON))" --package-folder $(PACKAGE)
	@$(PYTHON) -m integration.demo --since $(BEGIN) --engine $(ENGINE) --model $(MODEL) $(if $(NUM_PROMPTS),--num-prompts $(NUM_PROMPTS))
else
demo: demo-arguments base-python
	@$(BASE_PYTHON) -m integration.environment --venv $(VENV) --kind $(ENGINE)-$(DEVICE)
	@$(VENV)/bin/python -m integration.demo --since $(BEGIN) --engine $(ENGINE) --model $(MODEL) $(if $(NUM_PROMPTS),--num-prompts $(NUM_PROMPTS))
endif

# Before anything is installed.
.PHONY: demo-arguments
demo-arguments:
	@case "$(NUM_PROMPTS)" in *[!0-9]*) echo "error: NUM_PROMPTS=$(NUM_PROMPTS) must be a number" >&2; exit 1 ;; esac
	@case "$(ENGINE)" in vllm|sglang) ;; *) echo "error: ENGINE=$(ENGINE) must be vllm or sglang" >&2; exit 1 ;; esac
	@case "$(MODEL)" in smollm2*) ;; *) [ -f "$(MODEL)/config.json" ] || [ -f "integration/models/$(MODEL)/config.json" ] || \
		{ echo "error: MODEL=$(MODEL) must be smollm2, a folder with a config.json, or one of integration/models" >&2; exit 1; } ;; esac
ifdef PYTHON
	@command -v $(PYTHON) >/dev/null || { echo "error: PYTHON=$(PYTHON) is no program" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ("$(ENGINE)", "psutil"))))' || \
		{ echo "error: PYTHON=$(PYTHON) must have the packages $(ENGINE) and psutil" >&2; exit 1; }
endif

.PHONY: test
test: base-python
	@MAKE="$(MAKE)" $(BASE_PYTHON) -m integration.phases test KERNELS=--distinct
	@$(call warn_without_nvcc)

# A small environment and the tests that are not marked slow. Tests that need an engine are skipped, in sight.
.PHONY: check fast
check: base-python
	@MAKE="$(MAKE)" $(BASE_PYTHON) -m integration.phases check TEST_VENV="$(CHECK_VENV)" TEST_KIND=check
fast: environment
	@$(PYTEST) -n $(JOBS) -m "not slow" tests

.PHONY: environment
environment: base-python
	@$(BASE_PYTHON) -m integration.environment --venv $(TEST_VENV) --kind $(TEST_KIND)

# Tracked files and new ones.
CPP_FILES = git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cuh' '*.cu'
LINT_BUILD = .build/lint/$(TEST_KIND)

.PHONY: lint lint-python lint-cpp
# Both at the same time: mypy has one thread.
lint: environment
	@$(MAKE) --no-print-directory --jobs 2 TEST_VENV=$(TEST_VENV) TEST_KIND=$(TEST_KIND) lint-python lint-cpp
lint-python: environment
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy
	$(TEST_VENV)/bin/mypy -p integration
	$(TEST_VENV)/bin/mypy -p benchmarks
# those that plug into another project's classes need its types
	MYPYPATH=examples $(TEST_VENV)/bin/mypy examples --exclude '(mini_sglang|transformers_attention)\.py'
	$(TEST_VENV)/bin/mypy -p release
# clang-tidy: the files of the host library, as cmake compiles them.
lint-cpp: environment
	if [ -f .clang-format ]; then $(CPP_FILES) | xargs $(TEST_VENV)/bin/clang-format --dry-run -Werror; fi
	@PATH="$(abspath $(TEST_VENV)/bin):$$PATH" cmake -S . -B $(LINT_BUILD) -G Ninja -DPython_EXECUTABLE=$(TEST_PYTHON) -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	@$(TEST_PYTHON) -m integration.progress --who clang-tidy --counted '\[ *(\d+)/(\d+)\]' --things files --log .build/clang-tidy.log -- \
		$(TEST_PYTHON) $(TEST_VENV)/bin/run-clang-tidy.py -clang-tidy-binary $(TEST_VENV)/bin/clang-tidy -p $(LINT_BUILD) -quiet -j $(JOBS)

.PHONY: format
format: environment
	$(TEST_VENV)/bin/ruff format .
	if [ -f .clang-format ]; then $(CPP_FILES) | xargs $(TEST_VENV)/bin/clang-format -i; fi

.PHONY: unit
unit: environment
	@REQUIRE_ENGINES=1 $(PYTEST) -n $(JOBS) --dist worksteal --durations 10 -m "not integration" tests

.PHONY: fuzz
fuzz: environment
	PYTHONSAFEPATH= $(TEST_PYTHON) -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

# Tests that start engines, of one thread each; those of a file and an engine in one worker (pytest_xdist_make_scheduler of tests/integration/conftest.py), since they share what they start. One that takes too long is ended by a signal, so that the servers which it started end with it.
.PHONY: integration
integration: environment
	@REQUIRE_ENGINES=1 $(PYTEST) -n $(JOBS) --dist loadfile --durations 10 --timeout-method=signal -m integration tests/integration

# In the small environment: the releases' sources are read, no engine is installed.
.PHONY: releases
releases: TEST_VENV = $(CHECK_VENV)
releases: TEST_KIND = check
releases: environment
	@$(TEST_PYTHON) -m integration.new_releases --report results/releases.md

NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
define warn_without_nvcc
if [ -z "$(NVCC)" ]; then printf '\n*** NOT CHECKED: there is no nvcc on this machine, so no CUDA kernel was compiled. ***\n*** Install the CUDA toolkit (13.0 is what CI has) and run make kernels.       ***\n\n'; fi
endef

.PHONY: kernels
kernels: environment
ifeq ($(NVCC),)
	@$(call warn_without_nvcc)
else
	$(TEST_PYTHON) -m release.kernels $(addprefix --arch ,$(ARCHS)) --jobs $(JOBS) $(KERNELS)
endif

# Both at the same time: the second waits for the network. The test of the releases says which sources are missing.
.PHONY: kernels-and-sources engine-sources
kernels-and-sources: environment
	@$(MAKE) --no-print-directory --jobs 2 TEST_VENV=$(TEST_VENV) TEST_KIND=$(TEST_KIND) KERNELS="$(KERNELS)" kernels engine-sources
engine-sources: environment
	@$(TEST_PYTHON) -m integration.engine_sources >.build/engine_sources.log 2>&1 || true

DOCS_VENV ?= .venv-docs
.PHONY: docs
docs: base-python
	@$(BASE_PYTHON) -m integration.preflight --environment $(DOCS_VENV) --disk-gb 0.2 --packages mkdocs-material --no-compiler
	@[ -x $(DOCS_VENV)/bin/python ] || $(BASE_PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/pip install -q "mkdocs-material>=9.6" "mkdocstrings[python]>=0.30" "ruff>=0.14"
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "The site begins at .build/site/index.html"

RELEASE_VENV := .venv-release
.PHONY: wheel
wheel: base-python
	@$(BASE_PYTHON) -m integration.preflight --environment $(RELEASE_VENV) --disk-gb 1.5 --packages build,auditwheel --nvcc
	@[ -x $(RELEASE_VENV)/bin/python ] || $(BASE_PYTHON) -m venv $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python -m release.wheel --requirements | $(RELEASE_VENV)/bin/pip install -q -r /dev/stdin
	rm -rf build/cubins
	$(RELEASE_VENV)/bin/python -m release.kernels --jobs $(JOBS) --out build/cubins
	$(RELEASE_VENV)/bin/python -m release.wheel

.PHONY: base-python
base-python:
ifeq ($(BASE_PYTHON),)
	@echo "error: no Python 3.11, 3.12 or 3.13 on PATH (the CPU builds of the engines need one of them). Install one, or pass BASE_PYTHON=..." >&2; exit 1
else
	@command -v $(BASE_PYTHON) >/dev/null || { echo "error: BASE_PYTHON=$(BASE_PYTHON) is no program" >&2; exit 1; }
endif

.PHONY: clean distclean
clean:
	rm -rf build dist results .build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
distclean: clean
	rm -rf .venv .venv-check .venv-release .venv-docs .venv-vllm .venv-sglang
