"""What calibrate must have learned, from keys, values and attention that transformers computes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from vllm_kvevict.config.probe_weights import ProbeWeights


class Seen(NamedTuple):
    """Of one text: [L, H, n, D] keys before rotation, values or None for a latent cache, and
    [L, H, G, n, n] attention, in float64."""

    keys: torch.Tensor
    values: torch.Tensor | None
    attention: torch.Tensor


def features(keys: torch.Tensor) -> torch.Tensor:
    """[..., D + 2]: keys before rotation, their norms, 1."""
    norms = keys.norm(dim=-1, keepdim=True)
    return torch.cat([keys, norms, torch.ones_like(norms)], -1)


def seen_by_window(attention: torch.Tensor, columns: int) -> torch.Tensor:
    """[columns] the most that any query [G, w, n] gives one or one near it, at least the mean."""
    near = functional.avg_pool1d(attention[..., :columns].flatten(0, 1)[:, None], 5, 1, 2)
    peaks = near.amax(0)[0]
    most = torch.stack([peaks[max(0, i - 14) : i + 3].max() for i in range(columns)])
    return most.maximum(most.mean()).clamp(min=1e-6)


def ridge(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[..., size] weights; a penalty is as good as rows of its root, with targets of 0."""
    root = (1e-4 * x.shape[-2]) ** 0.5 * torch.eye(x.shape[-1])
    x = torch.cat([x, root.expand(*x.shape[:-2], -1, -1)], -2)
    y = functional.pad(y, (0, x.shape[-1]))
    return torch.linalg.lstsq(x, y[..., None]).solution[..., 0]


def check_learned(
    found: ProbeWeights,
    texts: Sequence[Any],
    watch: Callable[[list[int]], Seen],
    recent: int,
    window: int,
    prose: float,
) -> None:
    """Compare scores of the first text by a profile with those by the definition, token by token.

    Weights of norms that hardly differ are loose, and a layer's scores are compared but for a
    constant, which ranks nothing.

    Args:
        found: What calibrate wrote.
        texts: What it learned from.
        watch: Runs a text.
        recent: Last tokens of a context that are always kept.
        window: Observation window.
        prose: What the text that goes on counts.

    """
    rows: list[list[torch.Tensor]] = [[], [], [], []]
    for lesson in texts:
        n = len(lesson.context)
        count, most = n - recent, None
        for later in lesson.later:
            seen = watch([*lesson.context, *later.ids])
            given = seen.attention[..., n:, :n]
            padded = functional.pad(given, (2, 2))
            near = (sum(padded[..., i : i + n] for i in range(5)) / 5).amax((2, 3))
            most = near if most is None else most.maximum(near)
        # The last text is how the context goes on: its tokens count one by one.
        single = given.amax((2, 3))[..., :count]
        norms = torch.ones(single.shape[0], single.shape[1], n)
        if seen.values is not None:
            norms = seen.values[:, :, :n].norm(dim=-1)
        shares = norms / norms.sum(1, keepdim=True)
        worth = (most * shares)[..., :count]
        ages = torch.arange(n, recent, -1).double().log()[:, None].expand(*single.shape, 1)
        at_end = watch(list(lesson.context)).attention[..., -window:, :]
        columns = max(n - window, count)
        looked = [[seen_by_window(head, columns) for head in layer] for layer in at_end]
        log_seen = torch.stack([torch.stack(layer) for layer in looked])[..., :count].log()
        log_seen = log_seen + shares[..., :count].clamp(min=1e-6).log()
        x = features(seen.keys[:, :, :count])
        rows[0].append(x)
        rows[1].append((worth + 1e-6).log())
        rows[2].append(torch.cat([x, ages, ages**2, log_seen[..., None]], -1))
        rows[3].append((single + 1e-6).log())
    of_answers, y, of_text, z = (torch.cat(parts, 2) for parts in rows)
    answers = (of_answers @ ridge(of_answers, y)[..., None])[..., 0]
    first = rows[2][0]
    for kind, (window_weight, size) in enumerate(((0.0, -1), (0.6, None))):
        answered = answers + window_weight * of_text[..., -1]
        text = (of_text[..., :size] @ ridge(of_text[..., :size], z)[..., None])[..., 0]
        spread = [one.std((1, 2), correction=0)[:, None, None] for one in (answered, text)]
        follows = prose * spread[0] / spread[1] * text
        close = 1e-4 * (answered + follows)[..., : first.shape[2]].std()
        apart = torch.zeros(())
        assert found.prose is not None
        age = torch.from_numpy(found.prose.age[:, :, kind]).double()
        for part, added in ((answered, None), (follows, age)):
            source = found if added is None else found.prose
            mine = torch.from_numpy((source.keys, source.joined)[kind]).double()
            said = (first[..., :-3] @ mine[..., : first.shape[-1] - 3, None])[..., 0]
            if added is not None:
                said = said + (first[..., -3:-1] @ added[..., None])[..., 0]
            if kind:
                said = said + mine[..., -1:] * first[..., -1]
            expected = part[..., : first.shape[2]]
            if added is not None:
                # Of keys it says 0 on average over all that was learned from.
                of_keys = of_text[..., :-3] @ mine[..., : first.shape[-1] - 3, None]
                assert of_keys.mean((1, 2, 3)).abs().max() < 1e-2 * expected.std()
            difference = said - expected
            difference -= difference.mean((1, 2), keepdim=True)
            assert difference.abs().max() < close, float(difference.abs().max())
            apart = apart + difference
        assert apart.abs().max() < close, "of both together"
