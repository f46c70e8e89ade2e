"""The front door, as tests reach it: vLLM's parser and ``EngineArgs`` with the plugin in them."""

import importlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.versions import CLI_ARGS


@pytest.fixture(scope="module")
def registered() -> None:
    from vllm_kvevict.serving.plugin import register

    register()


@pytest.fixture(scope="module")
def parser(registered: None) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = importlib.import_module(CLI_ARGS)
    return cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A configuration without weights: nothing here loads a model."""
    settings = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        dtype="float32",
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    return str(tmp_path / "model")


@pytest.fixture
def build(registered: None, model: str) -> Any:
    """``EngineArgs(...).create_engine_config()`` with the given options."""

    def create(eviction: Any = None, **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        additional = {"additional_config": {"kv_eviction": eviction}} if eviction else {}
        return EngineArgs(
            **dict(
                model=model,
                skip_tokenizer_init=True,
                enforce_eager=True,
                kv_cache_memory_bytes=64 << 20,
                **additional,
            )
            | options
        ).create_engine_config()

    return create


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What our loggers say, at any level."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # vLLM's first configuration would take the handler away.
    configure_logging_if_needed(LoggingConfig())
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kv_eviction")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Unregister afterwards all metrics that a test has registered in this process."""
    from prometheus_client import REGISTRY

    from vllm_kvevict.metrics import prometheus

    yield
    while prometheus._registered:
        REGISTRY.unregister(prometheus._registered.pop())
