"""A format of stored tokens that is not the cache's, for tests of what asks a format."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat


class BytesFormat(TokenFormat):
    """Four tokens in the room of one: each float32 element is stored as one byte.

    Whole numbers from 0 to 255 come back as they were.
    """

    name = "bytes"  # type: ignore[assignment]
    as_cached = False

    def page_tokens(self, block_size: int) -> int:
        return 4 * block_size

    def planes(self, head_size: int) -> tuple[int, ...]:
        return head_size, head_size

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [keys.to(torch.uint8), values.to(torch.uint8)]

    def decode(self, planes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (plane.float() for plane in planes)
        return keys, values


BYTES = BytesFormat()
FORMATS = {"as cached": AS_CACHED, "bytes": BYTES}
