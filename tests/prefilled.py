"""Another server's prompts: their KV, computed without eviction, for connectors that load it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.oracles.engine import engine


class Prefilled:
    """KV of whole prompts, block by block, as vLLM computes them without eviction.

    Args:
        model: Folder of the checkpoint.
        prompts: Token ids of every prompt.
        settings: Settings of eviction of the server that will load the KV.
        options: Options of that server's engine.

    """

    def __init__(
        self, model: Path, prompts: list[list[int]], settings: dict[str, Any], **options: Any
    ) -> None:
        self._saved: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        never = [{"kv_eviction": "none"}] * len(prompts)
        allow = ",".join(filter(None, (settings.get("allow"), "none")))
        with engine(model, settings | dict(allow=allow), **options) as run:
            free = run.scheduler._free_blocks

            def freed(request: Any) -> None:
                self._save(run, request)
                free(request)

            run.scheduler._free_blocks = freed
            run.generate(prompts, 1, never)
            assert run.counters.evictions == 0
        assert len(self._saved) == len({tuple(prompt) for prompt in prompts})

    def _save(self, run: Any, request: Any) -> None:
        tables = run.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        groups = run.scheduler.kv_cache_config.kv_cache_groups
        layers = run.worker.compilation_config.static_forward_context
        self._saved[tuple(request.prompt_token_ids)] = {
            name: layers[name].kv_cache[list(table)].clone()
            for table, group in zip(tables, groups, strict=True)
            for name in group.layer_names
        }

    def write(
        self, prompt: list[int], cache: dict[str, torch.Tensor], blocks: dict[str, list[int]]
    ) -> None:
        """Write the KV of a prompt to blocks of each layer, of which the last holds its end."""
        for name, ids in blocks.items():
            saved = self._saved[tuple(prompt)][name]
            last = (len(prompt) - 2) // 32 + 1
            cache[name][ids] = saved[last - len(ids) : last]

    @contextmanager
    def serve(self, run: Any) -> Iterator[list[int]]:
        """Let vLLM's ``DecodeBenchConnector`` load the KV instead of dummy values.

        Yields:
            The tokens of every load so far.

        """
        connector = _worker_connector()
        half, loads = connector.connector_worker, []

        def start_fill_kv(metadata: Any) -> None:
            for request_id, (groups, num_tokens) in metadata.reqs_to_fill.items():
                blocks = {
                    name: ids
                    for group, ids in enumerate(groups)
                    for name in half.group_to_layers[group]
                }
                prompt = run.scheduler.requests[request_id].prompt_token_ids
                self.write(prompt, half.kv_caches, blocks)
                loads.append(num_tokens)

        half.start_fill_kv = start_fill_kv
        yield loads


def _worker_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
