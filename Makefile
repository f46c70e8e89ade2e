# One word, from a fresh checkout: everything that is missing is installed first.
PYTHON_VENV := .venv/bin/python
PYTEST_ARGS ?=
export VLLM_NO_USAGE_STATS := 1

.PHONY: help setup setup-kvpress lint format test demo wheel vllm-source clean

help:
	@echo "make setup    install vLLM 0.32.0, this package and the test tools into .venv"
	@echo "make demo     serve the same load without and with eviction; print one table"
	@echo "make test     all tests (PYTEST_ARGS='-k ...' for some)"
	@echo "make wheel    a wheel with the CUDA kernels, in dist/; needs nvcc, no GPU"
	@echo "make vllm-source  Python files of vLLM 0.33.0, for the test of our hooks"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff fix what it can"
	@echo "make clean    remove build outputs and caches; the environments stay"

setup:
	@packaging/setup_env.sh

setup-kvpress:
	@packaging/setup_kvpress.sh

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

test: setup setup-kvpress
	$(PYTHON_VENV) -m pytest $(PYTEST_ARGS)

demo: setup
	@$(PYTHON_VENV) -m benchmarks.demo

wheel: setup
	@packaging/build_wheel.sh

vllm-source:
	@packaging/fetch_vllm_source.sh

clean:
	rm -rf build dist *.egg-info packaging/vllm-cpu-metadata/build packaging/vllm-cpu-metadata/*.egg-info
	rm -rf .cache/models .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vllm_kvevict tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
