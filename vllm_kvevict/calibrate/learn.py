"""Learns a model's probes, shares out the budget under them, and says what answers lose."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch

from vllm_kvevict.calibrate import quality
from vllm_kvevict.calibrate.extension import EXTENSION
from vllm_kvevict.calibrate.lessons import Lesson
from vllm_kvevict.calibrate.options import CalibrateError
from vllm_kvevict.calibrate.pace import sentence
from vllm_kvevict.calibrate.regression import REST, spread_as
from vllm_kvevict.calibrate.rounds import LEAST_LESSONS, Taught, elapsed, has_networks, teach
from vllm_kvevict.config.budget import measured_part
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.probe_weights import (
    NetworkWeights,
    ProbeWeights,
    ProseWeights,
    prose_weights,
)

STRENGTH = 1e-4
"""Ridge penalty on a weight's square, for each token counted."""

WINDOW_WEIGHT = 0.6
"""Weight of the logarithm of the window's score relative to what answers taught a probe.

Not learned: windows of contexts, without the question, teach a weight that is too small if the
question is in them."""

STEPS = 128
"""Parts of a context at which it is measured what heads hold."""

ASKED = 4
"""Contexts about which the full cache is asked first, and questions of a context by which the
effect of layers is measured."""

LEAST = 0.05
"""Share of the mean that a head has at least."""

CUT, OF_BUDGET = 0.6, 0.75
"""What a layer keeps of its share while its effect on answers is measured, and what all layers keep
of the budget: at the budget itself, good probes lose too little to tell layers apart."""

STEP, LEAST_EFFECT = 0.35, 0.15
"""Power of a layer's effect per token by which its share changes, and the smallest effect relative
to the mean: effects are differences of few answers."""

FEW_LAYERS = 8
"""Most layers whose effects are measured. The effect of one of 30 layers is less than its error:
on SmolLM2-135M-Instruct shares by effect lost more at a sixteenth of the cache (KL 0.87 instead of
0.67)."""


@dataclass(frozen=True)
class Learned:
    """The content of a profile without the model's identity."""

    weights: ProbeWeights
    shares: torch.Tensor
    each: list[torch.Tensor]
    quality: dict[str, Any]
    seconds: dict[str, float]
    losses: tuple[float, ...]
    taught: Taught


class Model:
    """The model in vLLM's workers, by the methods that calibrate has added to them.

    Args:
        llm: vLLM's ``LLM``, with :data:`EXTENSION` in its workers.
        window: Observation window.
        recent: Last tokens of a context that are always kept.
        kv_heads: KV heads of a layer, over all ranks.

    Raises:
        CalibrateError: The model cannot be learned, in one sentence.

    """

    def __init__(self, llm: Any, window: int, recent: int, kv_heads: int) -> None:
        self._llm, self.recent = llm, recent
        self._answers: list[torch.Tensor] = []
        self._follows: list[torch.Tensor] = []
        """Weights that both kinds of texts taught: keys alone, and joined with the window."""
        self.losses: tuple[float, ...] = ()
        """Mean held-out squared error of the linear probes and of the networks, relative to the
        variance of the targets; empty if no network was learned."""
        ranks = self._all("kvevict_begin", window, recent)
        problems = [found["problem"] for found in ranks if found["problem"]]
        if problems:
            raise CalibrateError(f"no probe can be learned of this model: {problems[0]}")
        copies = len(ranks) * ranks[0]["heads"] // kv_heads
        self.layers = int(ranks[0]["layers"])
        self._mine = [
            [(found["first"] + head) // copies for head in range(found["heads"])] for found in ranks
        ]
        self._all("kvevict_heads", self._mine)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return list(self._llm.collective_rpc(method, args=args))

    def _whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[L, H, ...] of all heads, from [L, heads of a rank, ...]; copies are alike."""
        by_head = {
            head: part[:, index]
            for part, mine in zip(parts, self._mine, strict=True)
            for index, head in enumerate(mine)
        }
        return torch.stack([by_head[head] for head in sorted(by_head)], dim=1)

    def learn(self, lesson: Lesson, held: bool | None = None, lessons: int = 1) -> None:
        later = [later.ids for later in lesson.later]
        self._all("kvevict_learn", lesson.context, later, held, lessons)

    def judge(self) -> float:
        """Mean held-out error of networks that learn from the lessons so far."""
        losses = self._whole(self._all("kvevict_judge", STRENGTH))
        return float(losses[..., 1].mean())

    def captured(self, lesson: Lesson) -> torch.Tensor:
        """[L, H, STEPS] what heads hold of what a context's tokens are worth later."""
        later = [text.ids for text in lesson.later]
        return self._whole(self._all("kvevict_captured", lesson.context, later, STEPS))

    def solve(self, prose: float) -> ProbeWeights:
        """The probes, from all lessons so far.

        Each is what answers taught. To it comes what the text that follows did, in the same scale
        and times ``prose``, as far as an eviction's share says.
        """
        ranks = self._all("kvevict_solve", STRENGTH, WINDOW_WEIGHT)
        size = ranks[0]["keys"].shape[-1] - REST
        for kind in ("keys", "joined"):
            both, moments = (
                self._whole([rank[name] for rank in ranks]) for name in (kind, f"{kind}_moments")
            )
            self._answers.append(both[:, :, 0])
            self._follows.append(prose * spread_as(both[:, :, 1], moments, size + 1))
        added = None
        keys, joined = (_without_age(one, size) for one in self._answers)
        if prose:
            age = torch.stack([one[..., size + 2 : size + REST] for one in self._follows], dim=2)
            more = [_without_age(one, size) for one in self._follows]
            added = ProseWeights(more[0], more[1], age.numpy())
        network = None
        if "hidden" in ranks[0]:
            parts = ("hidden", "out", "loss")
            hidden, out, loss = (self._whole([rank[part] for rank in ranks]) for part in parts)
            self.losses = tuple(loss.mean((0, 1)).tolist())
            network = NetworkWeights(hidden.numpy(), out.numpy())
        return ProbeWeights(keys, joined, added, tuple(ranks[0]["rotated"]), network)

    def use(self, share: float, tokens: int) -> None:
        """Score as evictions do that keep this share of so many tokens.

        Keys alone score as inside a named context, and joined with the window as elsewhere.
        """
        parts = zip(prose_weights(share, tokens), self._answers, self._follows, strict=True)
        self._all("kvevict_use", *(torch.stack([one, by * more]) for by, one, more in parts))

    def hold(self, context: Sequence[int]) -> None:
        """Run a context, after which texts are tried."""
        self._all("kvevict_context", context)

    def scores(self, joined: bool) -> torch.Tensor:
        """[L, H, n - recent] of the context held; the next trials keep tokens by them."""
        return self._whole(self._all("kvevict_score", joined))

    def lost(
        self, text: Sequence[int], answer: int, trials: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KL divergences of an answer and whether it is right, as the worker does."""
        ranks = self._all("kvevict_later", text, answer, trials)
        return next(found for found in ranks if found is not None)


def _without_age(probe: torch.Tensor, size: int) -> np.ndarray:
    """[L, H, D + 2 or D + 3] of probes [L, H, D + 4 or D + 5] of keys of ``size`` dimensions."""
    return torch.cat([probe[..., : size + 2], probe[..., size + REST :]], dim=-1).numpy()


def divided(curves: torch.Tensor, mean: float) -> torch.Tensor:
    """Parts of their tokens that heads keep, so that all hold the most of what tokens are worth.

    Args:
        curves: [L, H, steps] what a head holds of its tokens' worth with 1 / steps of them, 2 /
            steps, ... all; each is replaced by the lowest concave curve above it.
        mean: Part that heads keep on average.

    Returns:
        [L, H] float64 of mean ``mean``, at least :data:`LEAST` and at most 1.

    """
    steps = curves.shape[-1]
    taken = []
    for head, curve in enumerate(curves.flatten(0, 1).tolist()):
        hull = [(0, 0.0)]
        for point in enumerate(curve, 1):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        taken += [(-_slope(a, b), head, (b[0] - a[0]) / steps) for a, b in pairwise(hull)]
    heads = curves.shape[0] * curves.shape[1]
    kept = torch.zeros(heads, dtype=torch.float64)
    left = mean * heads - LEAST * mean * heads
    for _, head, length in sorted(taken):
        part = min(length, left, 1 - float(kept[head]))
        kept[head] += part
        left -= part
    kept = kept.clamp(min=LEAST * mean)
    return (kept * (mean / kept.mean())).clamp(max=1).view(curves.shape[:2])


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def shares_of(
    model: Model, config: EvictionConfig, lessons: Sequence[Lesson], progress: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Shares of all heads [L, H], of mean 1, and each lesson's own."""
    curves, means, rule = [], [], config.rule(block_size=1)
    for lesson in progress(lessons, "shares"):
        length = len(lesson.context)
        model.use(rule.budget(length) / length, length)
        found = model.captured(lesson)
        curves.append(found / found[..., -1].mean())
        means.append(min(1.0, max(1, rule.store_blocks(length)) / (length - model.recent)))
    each = [divided(one, mean) / mean for one, mean in zip(curves, means, strict=True)]
    together = divided(torch.stack(curves).mean(0), fmean(means))
    return together / together.mean(), each


def by_effect(
    model: Model,
    config: EvictionConfig,
    shares: torch.Tensor,
    lessons: Sequence[Lesson],
    progress: Any,
) -> torch.Tensor:
    """Move the budget to layers without which answers lose the most.

    Attention says which heads hold what is asked, but not whether an answer needs it. All layers
    are cut to their shares, and each in turn to :data:`CUT` of its own. Cutting one layer while the
    others are whole would say less, because whole layers make up for it.

    Args:
        model: The model, with probes.
        config: The budget.
        shares: [L, H] of mean 1. Those of more than :data:`FEW_LAYERS` layers stay.
        lessons: Contexts and questions; without questions the shares stay.
        progress: Shows a bar.

    Returns:
        [L, H] of mean 1.

    """
    layers, rule = len(shares), config.rule(block_size=1)
    if not 1 < layers <= FEW_LAYERS:
        return shares
    # The last row of factors cuts no layer.
    factors = torch.ones(layers + 1, layers, 1)
    factors[range(layers), range(layers)] = CUT
    lost = []
    for lesson in progress(lessons, "effects"):
        questions = [later for later in lesson.later if later.asked][:ASKED]
        length = len(lesson.context)
        share = OF_BUDGET * rule.budget(length) / length
        if not questions or share >= 1:
            continue
        model.use(share, length)
        model.hold(lesson.context)
        model.scores(joined=False)
        trials = [
            quality.counts_of(factor * shares, share, length, model.recent) for factor in factors
        ]
        for later in questions:
            kl, _ = model.lost(later.ids, later.answer, trials)
            # The logarithm: one lost answer must not decide.
            lost.append(kl.clamp(min=0).log1p())
    if not lost:
        return shares
    mean = torch.stack(lost).double().mean(0)
    effect = (mean[:-1] - mean[-1]) / shares.mean(1)
    effect = effect.clamp(min=LEAST_EFFECT * float(effect.clamp(min=0).mean()) + 1e-9)
    shares = shares * (effect / effect.mean())[:, None] ** STEP
    return (shares / shares.mean()).clamp(min=LEAST)


def learned(
    llm: Any,
    config: EvictionConfig,
    kv_heads: int,
    lessons: Sequence[Lesson],
    answers: int,
    prose: float,
    held_out: Sequence[Lesson],
    progress: Any,
    least: float,
    limit: float = math.inf,
) -> Learned:
    """Learn of lessons, share out by the first ``answers``, judge by those held out.

    ``prose``: factor of the text that follows relative to what is asked. ``least``: share of
    the questions about contexts held out that the full cache must answer. ``limit``: seconds since
    calibrate began in which all is expected to end.
    """
    clock, seconds = time.perf_counter(), {}

    def lap(name: str) -> None:
        nonlocal clock
        clock, seconds[name] = time.perf_counter(), round(time.perf_counter() - clock, 1)

    model = Model(llm, config.window, config.recent_tokens(config.policy), kv_heads)
    pace = quality.check(model, held_out[:ASKED], least)
    cut_layers = model.layers if 1 < model.layers <= FEW_LAYERS else 0
    networks = has_networks(len(lessons))
    parts = pace.parts(lessons, lessons[:answers], held_out, networks, cut_layers)
    fewest = pace.parts(lessons[:LEAST_LESSONS], [], [], networks, 0)["probes"]
    rest, trained = parts["shares"] + parts["quality"], pace.training(lessons, networks)
    # Fewer lessons are learned if not all fit.
    parts["probes"] = max(fewest, min(parts["probes"], limit - elapsed() - rest))
    print(sentence(parts), file=sys.stderr, flush=True)
    taught = teach(model, lessons, limit - rest - trained, progress)
    weights = model.solve(prose)
    if not all(np.isfinite(array).all() for array in weights.arrays):
        raise CalibrateError("the probes are no numbers: give other --prompts or --documents")
    lap("probes")
    shares, each = shares_of(model, config, lessons[:answers], progress)
    shares = by_effect(model, config, shares, lessons[:answers], progress)
    shares = shares / shares.mean()
    lap("shares")
    measured_at = measured_part(config.budget)
    found = quality.measured(model, shares, measured_at, held_out, progress)
    lap("quality")
    return Learned(weights, shares, each, found, seconds, model.losses, taught)


def extended(engine_args: Any) -> Any:
    """The engine arguments of a model without eviction, and with calibrate in its workers."""
    others = {k: v for k, v in (engine_args.additional_config or {}).items() if k != CONFIG_KEY}
    return replace(
        engine_args,
        additional_config=others,
        worker_extension_cls=EXTENSION,
        enforce_eager=True,
    )
