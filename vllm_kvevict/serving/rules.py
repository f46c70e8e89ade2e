"""The server's settings and rules, as a front end reads them for each request."""

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import evictable_stages
from vllm_kvevict.config.names import CONFIG_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.rules.rule import EvictionRule


class ServerRules(NamedTuple):
    """Settings of a server that evicts, and the rule of each group of layers that does."""

    config: EvictionConfig
    rules: "tuple[EvictionRule, ...]"


class _Read(NamedTuple):
    """A parsed configuration and its source."""

    vllm_config: "VllmConfig"
    settings: Any
    block_size: int
    found: ServerRules | None


_last: _Read | None = None
"""The configuration that was read last: a process serves one engine, and reading an 80-layer
profile takes 4 ms."""


def server_rules(vllm_config: "VllmConfig") -> ServerRules | None:
    """The settings of an engine, read once for each configuration; None without KV eviction."""
    global _last
    settings = vllm_config.additional_config.get(CONFIG_KEY)
    cache = vllm_config.cache_config
    # What the engine core made of the flag, where blocks of full attention are larger.
    block_size = cache.effective_attention_block_size or cache.block_size
    last = _last
    known = last is not None and last.vllm_config is vllm_config
    if last is not None and known and last[1:3] == (settings, block_size):
        return last.found
    found = None
    if (config := EvictionConfig.parse(settings)) is not None:
        layers = config.layer_rules(block_size, *evictable_stages(vllm_config))
        found = ServerRules(config, tuple(dict.fromkeys(layers)))
    kept = dict(settings) if isinstance(settings, dict) else settings
    _last = _Read(vllm_config, kept, block_size, found)
    return found
