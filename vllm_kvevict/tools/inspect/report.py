"""A run in words and as JSON."""

from typing import Any

from vllm_kvevict.tools.inspect.find import Sighting
from vllm_kvevict.tools.inspect.kept import Layer
from vllm_kvevict.tools.inspect.spans import ranges
from vllm_kvevict.tools.inspect.view import View

TEXT_WIDTH = 72


def as_text(view: View) -> str:
    """The report for the terminal: summary, most kept spans, where looked-for text survived."""
    run, snapshot = view.run, view.snapshot
    lines = [
        f"policy   {view.policy}",
        f"prompt   {len(run.prompt.ids)} tokens; blocks of {run.block_size}: "
        f"{snapshot.blocks_before} before, {snapshot.blocks_after} after the eviction",
        f"state    {view.moment}; {view.evictions}",
        f"kept     {snapshot.tail_start} positions in front of the tail, of which a KV head "
        f"keeps {_mean_kept(view):.0f} on average; the tail of "
        f"{snapshot.num_tokens - snapshot.tail_start} stays in every head",
        f"answer   {run.answer!r}",
    ]
    if view.spans:
        lines += ["", "most kept spans", f"  {'positions':>15}  {'heads':>5}  text"]
        lines += [
            f"  {span.start:>7}-{span.stop - 1:<7}  {span.share:>5.0%}  "
            f"{view.text(span.start, span.stop, TEXT_WIDTH)}"
            for span in view.spans
        ]
    for sighting in view.sightings:
        lines += ["", *_sighting_lines(view, sighting)]
    return "\n".join(lines)


def in_short(view: View) -> str:
    """Another run of the same prompt, for the terminal: its policy and its answer."""
    return f"policy   {view.policy}\nanswer   {view.run.answer!r}"


def as_json(view: View) -> dict[str, Any]:
    """Everything of the picture; positions are [start, stop) pairs, store and tail together."""
    run, snapshot = view.run, view.snapshot
    return {
        "model": view.options.model,
        "prompt_file": str(view.options.prompt_file),
        "eviction": run.config.model_dump(),
        "block_size": run.block_size,
        "prompt_tokens": len(run.prompt.ids),
        "evict_at": run.prompt.evict_at,
        "answer": run.answer,
        "answer_token_ids": run.answer_ids,
        "evictions": run.evictions,
        "num_tokens": snapshot.num_tokens,
        "blocks_before": snapshot.blocks_before,
        "blocks_after": snapshot.blocks_after,
        "layers": [_layer(layer, snapshot.num_tokens) for layer in snapshot.layers],
        "spans": [
            {
                "positions": [span.start, span.stop],
                "share_of_heads": span.share,
                "text": run.decode(span.start, span.stop),
            }
            for span in view.spans
        ],
        "find": [
            {
                "text": sighting.text,
                "positions": [sighting.start, sighting.stop],
                "cached": sighting.cached,
                "tokens_held": [held.tolist() for held in sighting.held],
            }
            for sighting in view.sightings
        ],
    }


def _layer(layer: Layer, num_tokens: int) -> dict[str, Any]:
    held = layer.mask(num_tokens)
    return {
        "layer": layer.index,
        "tail_start": layer.tail_start,
        "heads": [
            {"pages": count, "kept": ranges(mask.nonzero()[0])}
            for count, mask in zip(layer.pages, held, strict=True)
        ],
    }


def _mean_kept(view: View) -> float:
    snapshot = view.snapshot
    return float(snapshot.counts()[:, : snapshot.tail_start].sum()) / snapshot.num_heads


def _sighting_lines(view: View, sighting: Sighting) -> list[str]:
    where = f"tokens {sighting.start}-{sighting.stop - 1}"
    lines = [f"{sighting.text!r} at {where}"]
    if not sighting.cached:
        return [lines[0] + ": after this eviction, so all of it is in the cache"]
    if sighting.start >= view.snapshot.tail_start:
        lines[0] += " (in the tail, which every head holds)"
    lines.append(f"  {'layer':>5}  {'whole':>7}  {'in part':>7}  tokens held by each KV head")
    for layer, whole, some, held in zip(
        view.snapshot.layers, sighting.whole, sighting.some, sighting.held, strict=True
    ):
        each = " ".join(f"{count}/{sighting.length}" for count in held)
        num_heads = len(held)
        lines.append(
            f"  {layer.index:>5}  {f'{whole}/{num_heads}':>7}  "
            f"{f'{some - whole}/{num_heads}':>7}  {each}"
        )
    heads = view.snapshot.num_heads
    lines.append(f"  whole in {sighting.whole.sum()} of {heads} heads")
    return lines
