# One word, from a fresh checkout: everything that is missing is installed first.
PYTHON_VENV := .venv/bin/python
PYTEST_ARGS ?=
# Two processes, a file at a time, long files first; a server or an engine takes a core.
PARALLEL := -n 2 --dist loadscope --no-loadscope-reorder
export VLLM_NO_USAGE_STATS := 1

.PHONY: help setup setup-kvpress setup-clients lint format check test nightly fuzz cells kernels architectures clients connectors demo papers results wheel dist sbom prometheus \
	kubectl chromium vllm-source next-vllm hooks clean

help:
	@echo "make setup    install vLLM 0.32.0, this package and the test tools into .venv"
	@echo "make demo     a real model without and with eviction: answers, conversations, a load"
	@echo "make check    lint, types, and the units that are quick: a minute"
	@echo "make test     a case of everything, with real servers (PYTEST_ARGS='-k ...' for some)"
	@echo "make architectures  every architecture of docs/compatibility.md, drafts, images, ranks and stages, token by token"
	@echo "make fuzz     a million scheduler steps of random days, by a seed that is printed"
	@echo "make nightly  fuzz, cells, kernels, architectures, clients, connectors and next-vllm"
	@echo "make cells    more of what make test runs: policies, chunk sizes, prefix caches, several servers,"
	@echo "              broken rules that the accounting must notice, the quality benchmark"
	@echo "make kernels  what to run when csrc/ or ops/ change: every scene under sanitizers, each barrier left out once"
	@echo "make clients  openai, LangChain, lm-eval and guidellm against a server that evicts"
	@echo "make connectors  NIXL between a prefill and a decode server instead of a stand-in, and LMCache"
	@echo "make papers   the policies of Ada-KV, NACL, H2O and SubGen on our tasks, for hours, next to the papers' numbers"
	@echo "make results  measure the files of benchmarks/results anew, for hours (REPEAT=--list shows them)"
	@echo "make wheel    a wheel with the CUDA kernels, in dist/; needs nvcc, no GPU"
	@echo "make dist     what a package index takes, checked by twine, in dist/; same commit, same bytes"
	@echo "make sbom     after make dist: bill of materials with licences (CycloneDX), in dist/"
	@echo "make prometheus  promtool and prometheus for the tests of deploy/grafana, in .cache/; no root"
	@echo "make kubectl  kubectl and helm for the tests of deploy/helm, in .cache/; no root"
	@echo "make chromium install Debian's chromium, for the tests of the page of inspect; needs root"
	@echo "make vllm-source  Python files of vLLM 0.33.0, for the test of our hooks"
	@echo "make next-vllm  engines and servers over these files and the compiled extension of 0.32.0, in .venv-0.33"
	@echo "make hooks    file and line of every hook in vLLM 0.32.0 and 0.33.0, into docs/dev/vllm-hooks.tsv"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff fix what it can"
	@echo "make clean    remove build outputs and caches; the environments stay"

setup:
	@packaging/setup_env.sh

setup-kvpress:
	@packaging/setup_kvpress.sh

setup-clients:
	@packaging/setup_clients.sh

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# What takes longer or is an extension: kernels, workers, tools. Days in the scheduler are in tests/engine.
LONGER := $(addprefix tests/unit/,worker ops benchmarks hooks deploy calibrate tools/plan)
CHECKED := tests/unit $(addprefix tests/engine/test_,scheduler.py in_place.py sharing.py turns.py audit.py)

check: lint
	$(PYTHON_VENV) -m pytest -q $(PARALLEL) -m "not slow and not nightly" $(addprefix --ignore=,$(LONGER)) $(CHECKED) $(PYTEST_ARGS)

test:
	@$(MAKE) --no-print-directory --jobs 2 setup setup-kvpress
	$(PYTHON_VENV) -m pytest $(PARALLEL) $(PYTEST_ARGS)

nightly: fuzz cells kernels architectures clients connectors next-vllm

KERNELS := tests/unit/ops tests/unit/worker tests/unit/test_cuda_build.py
ARCHITECTURES := $(addprefix tests/e2e/test_,architectures.py hybrids.py pictures.py sounds.py speculation.py \
	distributed.py drafting.py latent.py latent_probe.py gpu_on_cpu.py audit.py ray.py) tests/unit/serving/test_support.py
CLIENTS := tests/e2e/test_clients.py

# What `make test` leaves out and the other targets do not run.
cells: setup setup-kvpress
	$(PYTHON_VENV) -m pytest -m nightly $(PARALLEL) $(addprefix --ignore=,$(KERNELS) $(ARCHITECTURES) $(CLIENTS)) $(PYTEST_ARGS)

kernels: setup
	$(PYTHON_VENV) -m pytest -m "nightly or not nightly" $(PARALLEL) $(KERNELS) $(PYTEST_ARGS)

# Another seed every night; one that failed: make fuzz KVEVICT_SEED=...
KVEVICT_SEED ?= $(shell date +%Y%m%d)
KVEVICT_STEPS ?= 1000000

fuzz: setup
	KVEVICT_SEED=$(KVEVICT_SEED) KVEVICT_STEPS=$(KVEVICT_STEPS) $(PYTHON_VENV) -m pytest -s --timeout 0 \
		tests/engine/test_accounting.py $(PYTEST_ARGS)

architectures: setup
	@packaging/setup_torchvision.sh
	@packaging/setup_suffix.sh
	$(PYTHON_VENV) -m pytest -m "nightly or not nightly" $(PARALLEL) $(ARCHITECTURES) $(PYTEST_ARGS)

clients: setup setup-clients
	$(PYTHON_VENV) -m pytest -m "nightly or not nightly" $(CLIENTS) $(PYTEST_ARGS)

connectors: setup
	@packaging/setup_connectors.sh
	KVEVICT_NIXL=$(CURDIR)/.cache/nixl KVEVICT_LMCACHE=$(CURDIR)/.cache/lmcache $(PYTHON_VENV) -m pytest -m "nightly or not nightly" tests/e2e/test_two_servers.py tests/e2e/test_lmcache.py $(PYTEST_ARGS)

demo: setup
	@$(PYTHON_VENV) -m benchmarks.demo

# A run that was stopped goes on. PAPERS='--samples 10 --models smollm2' is a part.
PAPERS ?=

papers: setup
	@$(PYTHON_VENV) -m benchmarks.papers $(PAPERS)

# All on one commit, from a clean tree. A run that was stopped goes on.
REPEAT ?=

results: setup
	@$(PYTHON_VENV) -m benchmarks.repeat $(REPEAT)

wheel: setup
	@packaging/build_wheel.sh

dist:
	@packaging/dist.sh

sbom:
	@packaging/sbom.sh

prometheus:
	@packaging/setup_prometheus.sh

kubectl:
	@packaging/setup_kubectl.sh

chromium:
	@packaging/setup_chromium.sh

vllm-source:
	@packaging/fetch_vllm_source.sh

# What of the tests depends on vLLM's Python code.
NEXT := tests/engine tests/e2e $(addprefix tests/unit/,serving compat hooks engine cache stores)

next-vllm: setup
	@packaging/setup_next_vllm.sh
	.venv-0.33/bin/python -m pytest $(PARALLEL) $(NEXT) $(PYTEST_ARGS)

hooks: setup vllm-source
	@$(PYTHON_VENV) -m dev.hooks --vllm .cache/vllm-source/0.33.0/vllm --write docs/dev/vllm-hooks.tsv

clean:
	rm -rf build dist *.egg-info packaging/vllm-cpu-metadata/build packaging/vllm-cpu-metadata/*.egg-info
	rm -rf .cache/models .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vllm_kvevict tests benchmarks dev -name __pycache__ -type d -prune -exec rm -rf {} +
