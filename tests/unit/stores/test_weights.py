"""The checksum of weights in memory notices every update."""

import pytest
import torch

from vllm_kvevict.stores.weights import weights_in_memory


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(70, 90), torch.nn.Linear(90, 33, bias=False).bfloat16()
    return torch.nn.Sequential(*layers)


def test_a_copy_has_the_same():
    assert weights_in_memory(model()) == weights_in_memory(model())


def test_a_view_at_an_odd_place_counts_by_its_values():
    odd = model()
    flat = torch.zeros(odd[1].weight.numel() + 1, dtype=torch.bfloat16)
    flat[1:] = odd[1].weight.detach().flatten()
    odd[1].weight.data = flat[1:].view_as(odd[1].weight)
    assert weights_in_memory(odd) == weights_in_memory(model())


@pytest.mark.parametrize("index", [0, 4321, -1])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight"])
def test_one_number_makes_another(name, index):
    changed = model()
    values = changed.get_parameter(name).data.view(-1)
    values[index % values.numel()] += 0.5
    assert weights_in_memory(changed) != weights_in_memory(model())


def test_two_that_change_places_make_another():
    changed = model()
    changed[0].weight.data = changed[0].weight.data.flip(1).contiguous()
    assert weights_in_memory(changed) != weights_in_memory(model())
