"""Mixed steps on a GPU work in what was reserved at start-up, so vLLM's sizing knows of it."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.evict import BLOCK, HEADS, ROWS, SIZE, worker
from tests.pretend_gpu import pretended
from vllm_kvevict.attention import gpu_buffers
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape

LONGEST = 512


@pytest.mark.parametrize("kernel", ["flash", "triton", "xformers"])
def test_the_page_table_of_a_mixed_step_is_the_reserved_one(kernel, monkeypatch):
    monkeypatch.setattr(gpu_buffers, "head_lengths", lambda *arguments: None)
    with pretended(monkeypatch):
        state = worker("snapkv", fused=False, device="cuda").states[0]
        scratch = Scratch(kernel, Shape(HEADS, 2, SIZE, BLOCK, ROWS, LONGEST), torch.device("cpu"))
        buffers = GroupBuffers(state, scratch, state.tail_start.device)
        for starts, length in ([0, 1, 2, 5, 6], 200), ([0, 9, 10, 11, 12], LONGEST):
            common = SimpleNamespace(
                num_reqs=ROWS,
                query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.full((ROWS,), length, dtype=torch.int32, device="cuda"),
                seq_lens_cpu_upper_bound=torch.full((ROWS,), length, dtype=torch.int32),
                block_table_tensor=torch.zeros(ROWS, 32, dtype=torch.int32, device="cuda"),
                max_seq_len=length,
            )
            places = torch.arange(ROWS)
            table = buffers.extend(common, places, places).table
            assert len(table) == ROWS * HEADS and table.shape[1] * BLOCK >= length
            assert table.untyped_storage().data_ptr() == scratch.table.untyped_storage().data_ptr()
    assert scratch.num_bytes >= 4 * ROWS * HEADS * LONGEST // BLOCK
