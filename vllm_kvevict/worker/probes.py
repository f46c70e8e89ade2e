"""The model's probes on this rank: scores of keys, made once for each token."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.probe_weights import (
    STEPS,
    ProbeWeights,
    ProseWeights,
    prose_weight,
)
from vllm_kvevict.ops.pieces import by_layer, head_blocks, heads_at_once, joined
from vllm_kvevict.ops.torch.buffers import Buffers
from vllm_kvevict.ops.torch.probe import (
    Network,
    Rotation,
    age_features,
    probe_scores,
)
from vllm_kvevict.ops.torch.value_shares import value_shares
from vllm_kvevict.policies.probe import LEAST
from vllm_kvevict.rules.step_plan import Eviction
from vllm_kvevict.worker.ranks import sum_of_ranks
from vllm_kvevict.worker.rotary import Rotary


@dataclass(frozen=True)
class LayerProbe:
    """Probes of the KV heads of one layer on this rank.

    Args:
        weights: [H, C, D + 2] float32 of :func:`key_scores`; C is 1 without a window, else 2. With
            ``age`` [H, 2 * C, D + 2], of :func:`with_prose`.
        age: [H, C, 2] float32: of :func:`with_prose`; None if prose counts nothing.
        window: [H] float32: weight of the logarithm of ``defensive``'s score in the second.
        rotary: What rotated the keys; None for keys that were not.
        prose: What :meth:`at` joins, as learned; None for nothing.
        network: What is added to each of the C scores; None for nothing.

    """

    weights: torch.Tensor
    age: torch.Tensor | None
    window: torch.Tensor
    rotary: Rotary | None
    prose: "LayerProbe | None" = None
    network: Network | None = None

    def at(self, weight: float) -> "LayerProbe":
        """Return the probes for this weight of prose."""
        prose = self.prose
        if prose is None or not weight:
            return replace(self, prose=None)
        assert prose.age is not None
        both = torch.cat([self.weights, weight * prose.weights], dim=1)
        window = self.window + weight * prose.window
        return replace(self, weights=both, age=weight * prose.age, window=window, prose=None)

    def part(self, heads: slice) -> "LayerProbe":
        """Return the probes of some heads, as views."""
        network, age = self.network, self.age
        return replace(
            self,
            weights=self.weights[heads],
            age=None if age is None else age[heads],
            window=self.window[heads],
            network=None
            if network is None
            else Network(*(t[heads] for t in vars(network).values())),
            prose=None,
        )

    @classmethod
    def joined(cls, parts: "Sequence[LayerProbe]") -> "LayerProbe":
        """Return the probes of the heads of several layers whose keys are rotated alike."""
        first = parts[0]
        if len(parts) == 1:
            return first
        networks = [vars(part.network).values() for part in parts if part.network is not None]
        return replace(
            first,
            weights=torch.cat([part.weights for part in parts]),
            age=None
            if first.age is None
            else torch.cat([p.age for p in parts if p.age is not None]),
            window=torch.cat([part.window for part in parts]),
            network=Network(*map(torch.cat, zip(*networks, strict=True))) if networks else None,
        )

    @classmethod
    def of(
        cls,
        weights: ProbeWeights,
        depth: int,
        heads: Sequence[int],
        channels: int,
        rotary: Rotary | None,
        device: torch.device,
    ) -> "LayerProbe":
        """The probes of some heads.

        Args:
            weights: Of the whole model.
            depth: The layer among those that evict.
            heads: Numbers of this rank's heads in the layer, without copies.
            channels: C.
            rotary: What rotated the keys.
            device: The layer's.

        """
        mine = list(heads)

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        def part(of: ProbeWeights | ProseWeights, age: torch.Tensor | None) -> LayerProbe:
            keys, joined = of.keys[depth, mine], of.joined[depth, mine]
            both = np.stack([keys, joined[:, :-1]], axis=1)[:, :channels]
            return cls(put(both), age, put(joined[:, -1]), rotary)

        found, prose, learned = part(weights, None), weights.prose, weights.network
        if prose is not None:
            age = put(prose.age[depth, mine][:, :channels])
            found = replace(found, prose=part(prose, age))
        if learned is not None:
            hidden, out = put(learned.hidden[depth, mine]), put(learned.out[depth, mine])
            found = replace(found, network=Network.of(hidden, out))
        return found


class Probes:
    """Scores the keys of new candidates.

    Args:
        layers: Probes of every evictable layer on this rank, by name.
        caches: The caches of these layers.
        token_stats: Where the scores of kept tokens lie, in the first channels.

    """

    def __init__(
        self,
        layers: Mapping[str, LayerProbe],
        caches: Mapping[str, LayerCache],
        token_stats: TokenStats,
    ) -> None:
        first = next(iter(layers.values()))
        weights = [step / STEPS for step in range(STEPS + 1)] if first.prose is not None else [0.0]
        self.by_weight = {
            weight: {name: layer.at(weight) for name, layer in layers.items()} for weight in weights
        }
        """The probes by what prose counts in them."""
        self._caches = caches
        self._page_values = token_stats
        self._rotations: dict[int, tuple[torch.Tensor, Rotation]] = {}
        self._buffers = Buffers()
        self.channels = first.weights.shape[1]
        self.has_networks = first.network is not None

    def weight(self, eviction: Eviction) -> float:
        """Return the weight of prose in an eviction."""
        if len(self.by_weight) == 1:
            return 0.0
        return prose_weight(eviction.share, eviction.num_tokens, eviction.in_context)

    def at(self, eviction: Eviction) -> Mapping[str, LayerProbe]:
        """The probes of an eviction."""
        return self.by_weight[self.weight(eviction)]

    def scores(
        self,
        names: Sequence[str],
        grid: torch.Tensor,
        store_pages: int,
        positions: torch.Tensor,
        ages: torch.Tensor,
        eviction: Eviction,
    ) -> torch.Tensor:
        """Scores of all candidates of one request in L layers of a group.

        Args:
            names: The layers.
            grid: [L, H, P] int64 pages of the candidates.
            store_pages: The first pages of each head, with tokens that were scored before.
            positions: [N] or [3, N] int64 positions of the tokens after them.
            ages: [N] of these tokens: tokens from each to the end of the cache, itself included.
            eviction: That of the request.

        Returns:
            [L, H, N, C] float32, with N the tokens of P pages; anything on padding.

        """
        num_heads, caches = grid.shape[1], [self._caches[name] for name in names]
        latent = any(cache.is_latent for cache in caches)
        shares = None
        # The one head of a latent cache has all of a token's value, of which the logarithm is 0.
        if (self.channels > 1 or self.has_networks) and not latent:
            shares = self._log_shares(names, grid[..., store_pages:])
        probes, of_ages = self.at(eviction), age_features(ages)
        layers = [probes[name] for name in names]
        elements = (grid.shape[-1] - store_pages) * caches[0].layout.keys.numel()
        blocks = head_blocks(
            [self._kind(layer) for layer in layers],
            num_heads,
            heads_at_once(grid.device, num_heads, elements),
        )
        found = []
        for block in blocks:
            parts = list(by_layer(block, num_heads))
            rotary = layers[parts[0][0]].rotary
            rotation = None if rotary is None else self._rotation(rotary, positions)
            probe = LayerProbe.joined([layers[layer].part(heads) for layer, heads in parts])
            keys = joined(
                [
                    caches[layer].key_sequences(grid[layer, heads, store_pages:])
                    for layer, heads in parts
                ]
            )
            mine = None if shares is None else shares.flatten(0, 1)[block]
            prose = None if probe.age is None else (of_ages, probe.age)
            new = probe_scores(
                keys, rotation, probe.weights, prose, probe.network, mine, self._buffers
            )
            if self.channels > 1 and mine is not None:
                new[..., 1].addcmul_(mine, probe.window[:, None])
            found.append(new)
        scores = joined(found).unflatten(0, (len(names), num_heads))
        if not store_pages:
            return scores
        stored = [
            self._page_values.layer(name)[pages[:, :store_pages]][..., : self.channels].flatten(
                1, 2
            )
            for name, pages in zip(names, grid, strict=True)
        ]
        return torch.cat([torch.stack(stored), scores], dim=2)

    @staticmethod
    def _kind(probe: LayerProbe) -> Hashable:
        """Return a value that is equal for layers whose keys may be scored together."""
        return None if probe.rotary is None else id(probe.rotary.module)

    def free_buffers(self) -> None:
        """Drop the buffers of the last eviction, and its rotations of 8 * R bytes per token."""
        self._rotations.clear()
        self._buffers.clear()

    def _rotation(self, rotary: Rotary, positions: torch.Tensor) -> Rotation:
        """Return the last rotation if it is the same: groups and layers ask one by one."""
        known = self._rotations.get(id(rotary.module))
        # On a GPU a comparison would wait for the device.
        same = known is not None and (
            known[0] is positions or (positions.is_cpu and torch.equal(known[0], positions))
        )
        if known is None or not same:
            known = positions, rotary.rotation(positions)
            self._rotations[id(rotary.module)] = known
        return known[1]

    def _log_shares(self, names: Sequence[str], grid: torch.Tensor) -> torch.Tensor:
        """[L, H, N] logarithms of each head's share in the value norms of the grid's tokens."""
        norms = [
            self._caches[name].value_norms(pages) for name, pages in zip(names, grid, strict=True)
        ]
        found = value_shares(torch.stack(norms), sum_of_ranks)
        return found.clamp_(min=LEAST).log_()
