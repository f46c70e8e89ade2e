"""The model's probes of one group's layers, as the CUDA operations read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.cuda.limits import DTYPES
from vllm_kvevict.ops.cuda.probe import NetworkLayers, ProbeLayers
from vllm_kvevict.worker.probes import LayerProbe


@dataclass(frozen=True)
class GroupProbes:
    """Probes, and what takes the rotation out of the keys.

    Args:
        channels: C.
        weights: [L, H, C or 2 * C, D + 4] float32, for keys as they are stored.
        window: [L, H] float32.
        rotary: [positions, R] of each layer: cosines, then sines; empty where keys are not rotated.
        interleaved: Whether neighbouring dimensions are turned together.
        networks: Networks of these layers, for keys as they are stored; None without any.

    """

    channels: int
    weights: torch.Tensor
    window: torch.Tensor
    rotary: list[torch.Tensor]
    interleaved: bool
    networks: NetworkLayers | None

    @classmethod
    def of(
        cls,
        probes: Mapping[str, LayerProbe],
        caches: Mapping[str, LayerCache],
        names: Sequence[str],
        longest: int,
        networks: NetworkLayers | None = None,
    ) -> "GroupProbes | None":
        """The probes of these layers.

        Args:
            probes: Of every layer.
            caches: The caches of these layers.
            names: Layers of one group, in order.
            longest: Longest sequence in tokens.
            networks: Of these layers.

        Returns:
            None where the kernels cannot take the rotation out: positions that are not the token's
            number, no table of cosines, or tables that differ in size between layers.

        """
        mine = [probes[name] for name in names]
        modules = [one.rotary for one in mine if one.rotary is not None]
        tables = {id(one.module): one.table(longest) for one in modules}
        found = [table for table in tables.values() if table is not None]
        kinds = {(table.shape, table.dtype) for table in found}
        if len(found) < len(tables) or len(kinds) > 1 or len({o.interleaved for o in modules}) > 1:
            return None
        itemsize = caches[names[0]].stored.itemsize
        if found and (found[0].shape[1] * itemsize % 8 or found[0].dtype not in DTYPES):
            return None
        weights = torch.stack([one.weights for one in mine])
        scales = torch.tensor([caches[name].key_scale for name in names], device=weights.device)
        weights[..., :-1] *= scales.view(-1, 1, 1, 1)
        weights = torch.nn.functional.pad(weights, (0, 2))
        channels = weights.shape[2]
        for of_layer, one in zip(weights, mine, strict=True):
            if one.age is not None:
                channels = one.age.shape[1]
                of_layer[:, channels:, -2:] = one.age
        none = weights.new_empty(0)
        rotary = [none if o.rotary is None else tables[id(o.rotary.module)] for o in mine]
        return cls(
            channels,
            weights,
            torch.stack([one.window for one in mine]),
            [none if table is None else table for table in rotary],
            any(one.interleaved for one in modules),
            networks,
        )

    def part(self, layers: slice) -> "GroupProbes":
        """The probes of some layers."""
        networks = self.networks
        if networks is not None:
            networks = NetworkLayers(networks.weights[layers], networks.shares[layers])
        return replace(
            self,
            networks=networks,
            weights=self.weights[layers],
            window=self.window[layers],
            rotary=self.rotary[layers],
        )

    def layers(
        self,
        caches: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        head_indptr: torch.Tensor,
        old_store: torch.Tensor,
    ) -> ProbeLayers:
        """With the caches and tables of an eviction."""
        return ProbeLayers(
            self.channels,
            caches,
            self.weights,
            self.window,
            self.rotary,
            self.interleaved,
            kept,
            head_indptr,
            old_store,
            self.networks,
        )


def group_networks(
    probes: Mapping[str, LayerProbe], caches: Mapping[str, LayerCache], names: Sequence[str]
) -> NetworkLayers | None:
    """Return the networks of a group's layers, for keys as they are stored; None without any.

    Args:
        probes: Of every layer.
        caches: The caches of these layers.
        names: Layers of one group, in order.

    """
    weights, shares = [], []
    for name in names:
        network = probes[name].network
        if network is None:
            return None
        scale = caches[name].key_scale
        of_norm, others = network.rest.split([1, 2], dim=-1)
        parts = [network.keys * scale, of_norm * scale, others, network.out.mT]
        weights.append(torch.cat(parts, dim=-1).mT)
        shares.append(network.shares[:, 0])
    return NetworkLayers(torch.stack(weights).contiguous(), torch.stack(shares))
