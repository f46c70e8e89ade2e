"""A format of stored tokens that is not the cache's, for tests of what asks a format."""

import torch

from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat


class BytesFormat(TokenFormat):
    """Four tokens in the room of one: each float32 element is stored as one byte.

    Whole numbers from 0 to 255, times the scale, come back as they were.
    """

    name = "bytes"
    as_cached = False

    def page_tokens(self, block_size: int) -> int:
        return 4 * block_size

    def token_bytes(self, num_elements: int, itemsize: int) -> int:
        return num_elements * itemsize // 4

    def encode(self, elements: torch.Tensor, scale: float) -> torch.Tensor:
        return elements.to(torch.uint8)

    def decode(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        return stored.float() * scale


BYTES = BytesFormat()
FORMATS = {"as cached": AS_CACHED, "bytes": BYTES}
