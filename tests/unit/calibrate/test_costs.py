"""Costs of heads, beside eager attention under a mask of its own for one layer."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import random_prompt
from vllm_kvevict.calibrate.costs import ANSWER_TOKENS, Costs
from vllm_kvevict.calibrate.divide import LEVELS
from vllm_kvevict.calibrate.options import CalibrateError
from vllm_kvevict.policies.base import Scorer
from vllm_kvevict.policies.h2o import H2O

CONTEXT, WINDOW = 90, 8


class SmallKeys(Scorer):
    """Keys of small norm, which rotation leaves as they are."""

    def scores(self, candidates):
        return -candidates.keys[:, : candidates.num_candidates].float().norm(dim=-1)


def test_costs_are_those_of_eager_attention_under_a_mask(tiny_model_kv4):
    prompt = random_prompt(110, seed=5)
    found = Costs(str(tiny_model_kv4), SmallKeys(), WINDOW).of(prompt, CONTEXT)

    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_kv4, dtype="auto", attn_implementation="eager"
    ).eval()
    config = model.config
    heads, group = config.num_key_value_heads, config.num_attention_heads
    assert found.shape == (config.num_hidden_layers, heads, len(LEVELS))
    norms: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):

        def read(_, args, out, index=index):
            norms[index] = out[0].float().unflatten(-1, (heads, -1)).norm(dim=-1)

        layer.self_attn.k_proj.register_forward_hook(read)
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        answer = slice(len(prompt) - 1, whole.shape[1] - 1)
        full = model(whole).logits[0, answer].float().log_softmax(-1)
        kept_of = {index: rows[: CONTEXT - WINDOW].argsort(0) for index, rows in norms.items()}
        for index, head, level in ((0, 0, 0), (1, 3, 1), (2, 1, 2), (3, 2, 3)):
            gone = kept_of[index][int(LEVELS[level] * (CONTEXT - WINDOW)) :, head]
            mask = torch.full((whole.shape[1],) * 2, float("-inf")).triu(1)
            mask = mask.repeat(group, 1, 1)
            rows = slice(head * group // heads, (head + 1) * group // heads)
            mask[rows, CONTEXT:, gone[:, None]] = float("-inf")

            def only(_, args, given, mask=mask):
                return args, given | {"attention_mask": mask[None].to(model.dtype)}

            attention = model.model.layers[index].self_attn
            hook = attention.register_forward_pre_hook(only, with_kwargs=True)
            mine = model(whole).logits[0, answer].float().log_softmax(-1)
            hook.remove()
            expected = (full.exp() * (full - mine)).sum(-1).mean()
            assert found[index, head, level] == pytest.approx(float(expected), rel=0.05, abs=1e-6)
            assert expected > 1e-5


def test_scores_that_grow_are_refused(tiny_model_kv4):
    with pytest.raises(CalibrateError, match="not for h2o"):
        Costs(str(tiny_model_kv4), H2O(), WINDOW)
