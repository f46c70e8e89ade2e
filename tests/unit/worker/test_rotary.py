"""Rotations of vLLM's own modules are taken out; what is no rotation is seen."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_kvevict.ops.torch.probe import unrotated
from vllm_kvevict.worker.rotary import Rotary, find

CPU = torch.device("cpu")
SCALINGS = {
    "plain": (True, {}),
    "interleaved": (False, {}),
    "partial": (True, {"partial_rotary_factor": 0.5}),
    "partial-interleaved": (False, {"partial_rotary_factor": 0.5}),
    "yarn": (
        True,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "llama3": (
        True,
        dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mrope": (True, {"rope_type": "default", "mrope_section": [4, 6, 6]}),
}  # fmt: skip


def rope(name, dtype=torch.float32):
    neox, parameters = SCALINGS[name]
    with set_current_vllm_config(VllmConfig()):
        return get_rope(32, 512, neox, {"rope_theta": 10000.0} | parameters, dtype)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_module_does_is_taken_out(name, dtype):
    module, keys = rope(name, dtype), torch.randn(3, 40, 32)
    table = module.cos_sin_cache.clone()
    positions = torch.randint(0, 500, (40,))
    if name == "mrope":
        positions = torch.stack([positions, positions + 3, positions - positions % 5])
    flat = keys.transpose(0, 1).reshape(40, -1).to(dtype)
    turned = module.forward_native(positions, flat.clone(), flat.clone())[1]
    turned = turned.view(40, 3, 32).transpose(0, 1)
    assert not torch.allclose(turned.float(), keys, atol=0.5)
    rotary = Rotary(module)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    found = unrotated(turned, rotary.rotation(positions))
    torch.testing.assert_close(found, keys, rtol=tolerance, atol=tolerance)
    assert rotary.is_exact(512, CPU)
    assert module.cos_sin_cache.dtype == dtype and torch.equal(module.cos_sin_cache, table)


def test_the_end_of_a_latent_entry_is_turned_back():
    parameters = dict(rope_type="deepseek_yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.5)
    parameters |= dict(rope_theta=10000.0, original_max_position_embeddings=64)
    with set_current_vllm_config(VllmConfig()):
        module = get_rope(16, 512, False, parameters, torch.float32)
    entries, positions = torch.randn(40, 48), torch.randint(0, 500, (40,))
    turned = module.forward_native(positions, entries[:, None, 32:], entries[:, None, 32:])[1]
    cached = torch.cat([entries[:, :32], turned[:, 0]], dim=-1)
    beside, model = Attention(rotary_emb=module), nn.Module()
    beside.attn.kv_lora_rank, model.layers = 32, nn.ModuleList([beside])
    rotary = find(model, beside.attn)
    assert rotary.first == 32 and rotary.table(512) is None and rotary.is_exact(512, CPU)
    found = unrotated(cached[None], rotary.rotation(positions))[0]
    torch.testing.assert_close(found, entries, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cached, entries, atol=0.5)


def test_what_does_not_turn_pairs_is_seen(monkeypatch):
    module = rope("plain")
    monkeypatch.setattr(module, "forward_native", lambda at, q, k: (q, k.roll(1, -1)))
    assert not Rotary(module).is_exact(512, CPU)


class Attention(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.attn = nn.Identity()
        for name, part in parts.items():
            setattr(self, name, part)


def test_the_module_beside_the_attention_is_found():
    module = rope("plain")
    beside, none = Attention(rotary_emb=module), Attention(rotary_emb=None)
    off, bare = Attention(rotary_emb=module, use_rope=False), Attention()
    model = nn.Module()
    model.layers = nn.ModuleList([beside, none, off])
    assert find(model, beside.attn).module is module
    assert find(model, none.attn) is None and find(model, off.attn) is None
    model.layers.append(bare)
    with pytest.raises(ValueError, match="in no module that contains its attention"):
        find(model, bare.attn)
    model.rotary_emb = module
    assert find(model, bare.attn).module is module
    alone = nn.ModuleList([bare])
    assert find(alone, bare.attn) is None, "a model without rotary embeddings"


def test_positions_of_images():
    from vllm_kvevict.worker.runners import RowsV1

    told = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 2]])
    request = SimpleNamespace(mrope_positions=told, mrope_position_delta=-1)
    rows = RowsV1(SimpleNamespace(requests={"a": request}), 1, lambda row: False)
    found = rows.positions("a", 2, 7).tolist()
    assert found == [[2, 2, 3, 4, 5], [2, 3, 3, 4, 5], [2, 2, 3, 4, 5]]
    request.mrope_positions = None
    assert rows.positions("a", 2, 4).tolist() == [2, 3]
