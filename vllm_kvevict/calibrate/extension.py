"""The part of calibrate that runs on every rank, with vLLM's own model and parallelism.

vLLM mixes the class into its worker (``worker_extension_cls``), and the command calls its methods
by name. Nothing here touches the KV cache: contexts are held outside of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvevict.cache.spec import is_evictable
from vllm_kvevict.calibrate.attend import packed, positions_behind
from vllm_kvevict.calibrate.layers import Layers, Pass
from vllm_kvevict.calibrate.network import HEADS, Examples, Trained, trained
from vllm_kvevict.calibrate.regression import (
    LEAST,
    REST,
    Ridge,
    captured,
    features,
    following,
    scored,
    shares_of,
    target,
    window_feature,
)
from vllm_kvevict.ops.torch.probe import Network, network_scores, unrotated
from vllm_kvevict.worker.ranks import first_head, of_ranks, sum_of_ranks
from vllm_kvevict.worker.rotary import find

EXTENSION = "vllm_kvevict.calibrate.extension.CalibratingWorker"

MOST_BYTES = 2**31
"""Memory of a rank for the tokens that networks learn from."""


class CalibratingWorker:
    """Methods for ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def kvevict_begin(self, window: int, recent: int) -> dict[str, Any]:
        """Take the place of the model's attention.

        Args:
            window: Observation window.
            recent: Last tokens of a context that are always kept.

        Returns:
            ``problem``: one sentence, or None; ``heads`` on this rank, ``first`` of them in its
            layer, ``layers`` that evict, ``head_size``.

        """
        specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        # Experts stand there, too, and keep nothing of earlier tokens.
        attentions = {n: layer for n, layer in layers if isinstance(layer, AttentionLayerBase)}
        names = sorted((n for n, s in specs.items() if is_evictable(s)), key=extract_layer_index)
        kinds = Attention, MLAAttention
        others = [n for n, layer in attentions.items() if type(layer) not in kinds]
        if others or not names:
            kind = type(attentions[others[0]]).__name__ if others else "no full attention"
            return {"problem": f"not every layer is attention ({kind})"}
        model = self.model_runner.get_model()
        self._kvevict = Layers(attentions, names, window)
        self._kvevict_recent = recent
        try:
            self._kvevict_rotary = {name: find(model, attentions[name]) for name in names}
        except ValueError as error:
            return {"problem": str(error)}
        longest = self.vllm_config.model_config.max_model_len
        for rotary in {id(r.module): r for r in self._kvevict_rotary.values() if r}.values():
            self._kvevict.watch(rotary.module)
            if not rotary.is_exact(longest, self.device):
                name = type(rotary.module).__name__
                return {"problem": f"{name} does not turn pairs of dimensions"}
        layer = attentions[names[0]]
        heads, size = layer.num_kv_heads, layer.head_size
        # What answers look for has no age.
        sizes = size + 2, size + REST + 1
        self._kvevict_ridge, self._kvevict_following = (
            {name: Ridge(heads, count, self.device) for name in names} for count in sizes
        )
        self._kvevict_examples: dict[bool, dict[str, list[Examples]]] = {
            held: {name: [] for name in names} for held in (False, True)
        }
        self._kvevict_networks: dict[str, Network] = {}
        self._kvevict_trained: dict[str, Trained] = {}
        self._kvevict_random = torch.Generator().manual_seed(0)
        first = first_head(heads)
        return dict(problem=None, heads=heads, first=first, layers=len(names), head_size=size)

    @torch.inference_mode()
    def kvevict_context(self, ids: Sequence[int]) -> None:
        """Run a context and hold it."""
        with self._kvevict.doing(Pass()):
            self._kvevict_run(ids, 0, 1)

    @torch.inference_mode()
    def kvevict_learn(
        self, ids: Sequence[int], later: Sequence[Sequence[int]], held: bool | None, lessons: int
    ) -> None:
        """Count a context and the texts that follow it, each alone.

        The last of them is how the context goes on. ``held`` says whether networks are judged by
        the context or learn from it; None if there are none. Of each of so many ``lessons`` a part
        of the tokens is held for the networks if all of them would take more than
        :data:`MOST_BYTES`.
        """
        self._kvevict_trained.clear()
        self.kvevict_context(ids)
        count = len(ids) - self._kvevict_recent
        most, single = self._kvevict_most(later, len(ids))
        seen = self._kvevict_seen()
        for name, x in self._kvevict_features().items():
            shares = self._kvevict_shares(name)
            keys, worth = x[..., : 2 - REST], target(most[name], shares)[:, :count]
            if not held:
                self._kvevict_ridge[name].add(keys, worth)
            if held is not None:
                example = Examples.of(keys, shares[:, :count], worth, seen[name])
                layers = len(self._kvevict.evictable)
                token = layers * len(worth) * (2 * (keys.shape[-1] + 1) + 8)
                most_tokens = max(64, MOST_BYTES // (token * lessons))
                example = example.thinned(most_tokens, self._kvevict_random)
                self._kvevict_examples[held][name].append(example)
            both = torch.cat([x, seen[name][..., None]], dim=-1)
            self._kvevict_following[name].add(both, following(single[name])[:, :count])

    @torch.inference_mode()
    def kvevict_captured(
        self, ids: Sequence[int], later: Sequence[Sequence[int]], steps: int
    ) -> torch.Tensor:
        """[L, H, steps] what heads hold of the worth of a context's tokens, by both probes.

        A token is worth the highest attention that a later query gives it, times the head's share
        of its values' norms.
        """
        self.kvevict_context(ids)
        most, found = self._kvevict_most(later, len(ids))[0], []
        seen = self._kvevict_seen()
        for index, (name, x) in enumerate(self._kvevict_features().items()):
            count = x.shape[1]
            worth = (most[name] * self._kvevict_shares(name))[:, :count]
            network = self._kvevict_said(name, x)
            by_probe = [
                captured(scored(x, seen[name], weights[:, index]) + network, worth, steps)
                for weights in (self._kvevict_keys, self._kvevict_joined)
            ]
            found.append(sum(by_probe) / 2)
        return torch.stack(found).cpu()

    def _kvevict_most(
        self, later: Sequence[Sequence[int]], start: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """[H, n] the highest attention that texts after the context give its tokens, by layer.

        Of all of them, averaged over neighbours; and of the last, of each token alone.
        """
        most: dict[str, torch.Tensor] = {}
        queries = max(layer.num_heads for layer in self._kvevict.attentions.values())
        for texts in (*packed(later[:-1], queries, start), later[-1:]):
            with self._kvevict.doing(Pass(rows=1, lengths=[*map(len, texts)], most={})) as done:
                self._kvevict_run([token for text in texts for token in text], start, 1)
            for name, given in (done.most or {}).items():
                most[name] = torch.maximum(most[name], given) if name in most else given
        return self._kvevict_of_ranks(most), self._kvevict_of_ranks(done.single)

    def _kvevict_of_ranks(self, most: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The highest over ranks that share a head: each has some of its query heads."""
        if self._kvevict_copies == 1:
            return most
        mine, found = self._kvevict_mine[get_tensor_model_parallel_rank()], {}
        for name, given in most.items():
            parts = of_ranks(given)
            held = [parts[self._kvevict_mine == head].amax(0) for head in mine]
            found[name] = torch.stack(held)
        return found

    def _kvevict_latent(self, name: str) -> bool:
        return isinstance(self._kvevict.attentions[name], MLAAttention)

    def _kvevict_shares(self, name: str) -> torch.Tensor:
        """[H, n] share of each head in the norms of a token's values; 1 of a latent cache."""
        values = self._kvevict.context[name].values
        if self._kvevict_latent(name):
            return torch.ones(values.shape[:2], device=values.device)
        return shares_of(values, sum_of_ranks) * self._kvevict_copies

    def kvevict_judge(self, strength: float) -> torch.Tensor:
        """[L, H, 2] held-out losses of ``network.Trained``, of networks of the lessons so far."""
        names = self._kvevict.evictable
        linears = {name: self._kvevict_ridge[name].solve(strength) for name in names}
        self._kvevict_trained = self._kvevict_train(linears)
        return torch.stack([self._kvevict_trained[name].loss for name in names]).cpu()

    def kvevict_solve(self, strength: float, window: float) -> dict[str, Any]:
        """Return what this rank's heads have learned, by the keys alone and joined with the window.

        Args:
            strength: Ridge penalty, for each token.
            window: Weight of the window's score relative to what answers taught.

        Returns:
            ``keys``: [L, H, 2, D + 4] probes of answers and of what follows; ``joined``: the same,
            [L, H, 2, D + 5]; ``keys_moments`` and ``joined_moments``: [L, H, 2, 3] theirs;
            ``rotated``: by layer; and if networks were learned, ``hidden``: [L, H, U, D + 3],
            ``out``: [L, H, U + 1], and ``loss``: [L, H, 2], of ``network.Trained``.

        """
        names = self._kvevict.evictable
        found: dict[str, list[torch.Tensor]] = {}
        linears = {name: self._kvevict_ridge[name].solve(strength) for name in names}
        learned = self._kvevict_trained or self._kvevict_train(linears)
        for judges in self._kvevict_examples[True].values():
            judges.clear()
        for name in names:
            follows, linear = self._kvevict_following[name], linears[name]
            if network := learned.get(name):
                some = Examples.joined(self._kvevict_examples[False][name])
                self._kvevict_examples[False][name].clear()
                self._kvevict_networks[name] = Network.of(network.hidden, network.out)
                for part in ("hidden", "out", "loss"):
                    found.setdefault(part, []).append(getattr(network, part))
                linear = network.linear
            keys = torch.nn.functional.pad(linear, (0, REST - 2))
            size = keys.shape[-1]
            for kind, first, count in (
                ("keys", keys, size),
                ("joined", torch.nn.functional.pad(keys, (0, 1), value=window), size + 1),
            ):
                both = first, follows.solve(strength, count)
                found.setdefault(kind, []).append(torch.stack(both, 1))
                moments = [follows.moments(one, size - REST + 1) for one in both]
                if network is not None:
                    said = some.scores(linear, self._kvevict_networks[name])
                    said = (said + window * some.seen if kind == "joined" else said).double()
                    none = torch.zeros(len(said), device=said.device)
                    moments[0] = torch.stack([said.mean(1), said.square().mean(1), none], -1)
                found.setdefault(f"{kind}_moments", []).append(torch.stack(moments, 1))
        rotated = [self._kvevict.rotated[name] for name in names]
        return {kind: torch.stack(rows).cpu() for kind, rows in found.items()} | dict(
            rotated=rotated
        )

    def _kvevict_train(self, linears: dict[str, torch.Tensor]) -> dict[str, Trained]:
        """Networks by layer; none if no context was held out. Several layers are trained together,
        because the operations on one layer's few heads are too small for a device."""
        learn, held = (self._kvevict_examples[part] for part in (False, True))
        names = [name for name in linears if learn[name] and held[name]]
        found: dict[str, Trained] = {}
        while names:
            heads = len(linears[names[0]])
            some, names = names[: -(-HEADS // heads)], names[-(-HEADS // heads) :]
            mine, judges = (
                Examples.of_heads([Examples.joined(part[name]) for name in some])
                for part in (learn, held)
            )
            linear = torch.cat([linears[name] for name in some])
            networks = trained(mine.x, mine.y, judges.x, judges.y, linear)
            found |= zip(some, networks.split(heads), strict=True)
        return found

    def kvevict_use(self, keys: torch.Tensor, joined: torch.Tensor) -> None:
        """Score by these probes [2, L, H, D + 4] and [2, L, H, D + 5], of the heads of all ranks.

        The first of two is what answers taught, the second what follows.
        """
        mine = self._kvevict_mine[get_tensor_model_parallel_rank()]
        self._kvevict_keys = keys[:, :, mine].to(self.device)
        self._kvevict_joined = joined[:, :, mine].to(self.device)

    @torch.inference_mode()
    def kvevict_score(self, joined: bool) -> torch.Tensor:
        """[L, H, n - recent] scores of the context's tokens, held for masks."""
        weights, seen = self._kvevict_keys, self._kvevict_seen()
        if joined:
            weights = self._kvevict_joined
        self._kvevict_scores = torch.stack(
            [
                scored(x, seen[name], weights[:, index]) + self._kvevict_said(name, x)
                for index, (name, x) in enumerate(self._kvevict_features().items())
            ]
        )
        return self._kvevict_scores.cpu()

    @torch.inference_mode()
    def kvevict_later(
        self, text: Sequence[int], answer: int, trials: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what an answer loses if parts of its context are evicted.

        Args:
            text: Tokens after the context, with the answer at their end.
            answer: Tokens of the answer.
            trials: Each the tokens that every head of every layer keeps by the scores of
                :meth:`kvevict_score`, without the last ones: nested lists, of the heads of all
                ranks.

        Returns:
            [len(trials)] mean over the answer's tokens of the KL divergence of the next token's
            distribution from that after the whole context; and [len(trials) + 1] whether every
            token but the last, which ends the sentence, is the most probable one: after the whole
            context, and in the trials. None on a rank without logits.

        """
        layers = self._kvevict
        first = layers.context[layers.evictable[0]].keys
        length = first.shape[1] - self._kvevict_recent
        rank = first.new_empty(len(layers.evictable), len(first), 0)
        if trials:
            rank = self._kvevict_scores.argsort(-1, descending=True).argsort(-1)
        counts = torch.full((len(trials) + 1, *rank.shape[:2]), length)
        mine = self._kvevict_mine[get_tensor_model_parallel_rank()]
        for row, trial in enumerate(trials, 1):
            counts[row] = torch.as_tensor(trial)[:, mine]
        keep = {}
        for index, name in enumerate(layers.evictable):
            if int(counts[:, index].min()) < length:
                kept = rank[index] < counts[:, index].to(rank.device)[..., None]
                keep[name] = torch.nn.functional.pad(kept, (0, self._kvevict_recent), value=True)
        start = length + self._kvevict_recent
        with layers.doing(Pass(rows=len(trials) + 1, keep=keep)):
            hidden = self._kvevict_run(text, start, len(counts))
        rows = hidden.unflatten(0, (len(counts), -1))[:, -answer - 1 : -1]
        logits = self.model_runner.get_model().compute_logits(rows.flatten(0, 1))
        if logits is None:
            return None
        found = logits.float().log_softmax(-1).unflatten(0, (len(counts), -1))
        lost = (found[0].exp() * (found[0] - found[1:])).sum(-1).mean(-1).cpu()
        wanted = torch.tensor(list(text[-answer:]), device=found.device)
        right = (found.argmax(-1) == wanted)[:, : max(1, answer - 1)].all(-1)
        return lost, right.cpu()

    def _kvevict_said(self, name: str, x: torch.Tensor) -> torch.Tensor | float:
        """[H, n - recent] what the networks of a layer add for tokens of :func:`features`."""
        if name not in self._kvevict_networks:
            return 0.0
        shares = self._kvevict_shares(name)[:, : x.shape[1]].clamp(min=LEAST).log()
        return network_scores(x[..., :-REST], self._kvevict_networks[name], shares)

    def kvevict_heads(self, mine: Sequence[Sequence[int]]) -> None:
        """Say which heads of a layer the heads of each rank are."""
        self._kvevict_mine = torch.tensor(mine)
        self._kvevict_copies = self._kvevict_mine.numel() // len(self._kvevict_mine.unique())

    def _kvevict_features(self) -> dict[str, torch.Tensor]:
        """[H, n - recent, D + 4] features of the context's tokens, by layer."""
        layers, found = self._kvevict, {}
        rotations: dict[int, Any] = {}
        for name in layers.evictable:
            keys = layers.context[name].keys
            count = keys.shape[1] - self._kvevict_recent
            rotation, rotary = None, self._kvevict_rotary[name]
            if rotary is not None and layers.rotated[name]:
                if id(rotary.module) not in rotations:
                    positions = torch.arange(count, device=keys.device)
                    rotations[id(rotary.module)] = rotary.rotation(positions)
                rotation = rotations[id(rotary.module)]
            found[name] = features(unrotated(keys[:, :count], rotation), keys.shape[1])
        return found

    def _kvevict_seen(self) -> dict[str, torch.Tensor]:
        """[H, n - recent] logarithms of what the window gives the context's tokens, by layer."""
        layers, found = self._kvevict, {}
        for name in layers.evictable:
            held, kind = layers.context[name], layers.kind(name)
            shares = self._kvevict_shares(name)[:, : -self._kvevict_recent]
            how = kind.scale, kind.softcap, kind.sinks
            queries = self._kvevict_group(held.queries)
            found[name] = window_feature(held.keys, queries, shares, *how)
        return found

    def _kvevict_group(self, queries: torch.Tensor) -> torch.Tensor:
        """[H, G, w, D] queries of all ranks that share this rank's heads [H, part of G, w, D]."""
        if self._kvevict_copies == 1:
            return queries
        parts = of_ranks(queries.contiguous())
        mine = self._kvevict_mine[get_tensor_model_parallel_rank()]
        return torch.stack([parts[self._kvevict_mine == head].flatten(0, 1) for head in mine])

    def _kvevict_run(self, ids: Sequence[int], start: int, rows: int) -> torch.Tensor:
        """[rows * len(ids), hidden] of the model for rows of the same text from ``start`` on.

        The text may be several of them, each from ``start`` on, if the pass says so.
        """
        tokens = torch.tensor(list(ids), device=self.device).repeat(rows)
        lengths = self._kvevict.lengths or [len(ids)]
        positions = positions_behind(start, lengths, self.device).repeat(rows)
        if self.vllm_config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        with set_forward_context(None, self.vllm_config, num_tokens=len(tokens)):
            return self.model_runner.get_model()(input_ids=tokens, positions=positions)
