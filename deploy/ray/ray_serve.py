"""A Ray Serve LLM application with KV eviction.

The YAML files of this folder name :func:`app` as ``ray_serve:app``. This folder must be on the
``PYTHONPATH`` of every node of the Ray cluster.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMConfig, LLMServer, LLMServingArgs, build_openai_app

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.metrics import logger as stat_logger
from vllm_kvevict.serving import admission
from vllm_kvevict.serving.plugin import register


class EvictingLLMServer(LLMServer):
    """Ray's LLM server. Requests are checked and metrics are kept in its process.

    Ray builds vLLM's configuration in a task of its own where there are accelerators, so what
    the plugin arranges in addition to the configuration is arranged here.
    """

    # Ray awaits the constructor.
    async def __init__(self, llm_config: LLMConfig, **options: Any) -> None:  # type: ignore[misc]
        register()
        admission.install()
        stat_logger.install()
        await super().__init__(llm_config, **options)


def app(args: Mapping[str, Any]) -> Application:
    """An OpenAI endpoint over models of which at least one has settings of eviction.

    Args:
        args: As for ``ray.serve.llm:build_openai_app``; a model evicts where its
            ``engine_kwargs.additional_config.kv_eviction`` says so. The policy ``none`` rolls a
            model back to stock vLLM.

    Raises:
        ValueError: In one sentence, what is wrong with a model's settings, or that no model has
            any.

    """
    serving = LLMServingArgs.model_validate(dict(args))
    settings = [(config, _settings(config)) for config in serving.llm_configs]
    if all(found is None for _, found in settings):
        raise ValueError(
            "KV eviction: no model sets engine_kwargs.additional_config.kv_eviction; serve them "
            "with ray.serve.llm:build_openai_app"
        )
    for config, found in settings:
        if EvictionConfig.parse(found) is not None:
            config.server_cls = EvictingLLMServer
    return build_openai_app(serving)


def _settings(config: LLMConfig) -> Any:
    return (config.engine_kwargs.get("additional_config") or {}).get(CONFIG_KEY)
