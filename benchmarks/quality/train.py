"""Train the small model: `python -m benchmarks.quality.train --output FOLDER`.

A curriculum of growing lengths. The loss is the cross-entropy of answers, plus a little of
every other token. Resumable from its last checkpoint.
"""

import argparse
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.quality import data, tasks
from benchmarks.quality.card import write_card
from benchmarks.quality.model import new_model
from benchmarks.quality.tokenizer import END, build

CONTEXT_LOSS = 0.1
"""Weight of the tokens that are no answer; their words are drawn at random."""

RECIPE = (
    "64x32:900",
    "256x16:1000@2e-3",
    "512x8:600@2e-3",
    "1024x4:600@2e-3",
    "2048x2:1100@2e-3",
)
"""Copying heads appear near step 550, in 64 tokens."""


@dataclass(frozen=True)
class Stage:
    """``steps`` batches of ``size`` sequences of ``length`` tokens, at a peak rate of its own."""

    length: int
    size: int
    steps: int
    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Stage":
        """Read ``LENGTHxSIZE:STEPS[@RATE]``; raises ValueError."""
        text, _, rate = text.partition("@")
        shape, steps = text.split(":")
        length, size = shape.split("x")
        return cls(int(length), int(size), int(steps), float(rate) if rate else None)

    def __str__(self) -> str:
        own_rate = f"@{self.rate:g}" if self.rate else ""
        return f"{self.length}x{self.size}:{self.steps}{own_rate}"


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of answer tokens plus a share of that of an eighth of the others."""
    other = (torch.rand(ids.shape) < 0.125) & ~answer & (ids != 0)
    picked = (answer | other)[:, 1:]
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][picked]
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden).float(), ids[:, 1:][picked], reduction="none"
    )
    mask = answer[:, 1:][picked]
    return losses[mask].mean() + CONTEXT_LOSS * losses[~mask].mean()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, length: int, samples: int
) -> dict[str, float]:
    """Share of right answer tokens by task, on held-out material, teacher-forced.

    In the tasks that ask for a set of words any word of the set is right.
    """
    model.eval()
    stops = torch.tensor(tokenizer.convert_tokens_to_ids([",", END]))
    found = {}
    for task in tasks.TASKS:
        right: list[bool] = []
        for seed in range(samples):
            sample = tasks.make(task, max(24, length - 72), 1_000_000 + seed)
            turns = [(sample.question, sample.answers)]
            turn = tasks.Dialogue(sample.context, turns, sample.separator)
            ids, mask = data.encode(tokenizer, turn, length)
            tokens, answer = torch.tensor([ids]), torch.tensor([mask])[:, 1:]
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1][answer]
                predicted = model.lm_head(hidden).argmax(-1)
            target = tokens[:, 1:][answer]
            if task in ("cwe", "fwe"):
                word = ~torch.isin(target, stops)
                right += torch.isin(predicted[word], target[word]).tolist()
            else:
                right.append(bool((predicted == target).all()))
        found[task] = sum(right) / len(right)
    model.train()
    return found


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_at(step: int, total: int, warmup: int, decay: float) -> float:
    """Share of the peak learning rate: warm-up, plateau, linear decay over the last part."""
    left = (total - step) / max(1, total * decay)
    return min(1.0, (step + 1) / warmup, left)


def weights(text: str) -> dict[str, float]:
    """Read ``KIND=WEIGHT,...``; raises ValueError."""
    found = {kind: float(weight) for kind, weight in (p.split("=") for p in text.split(","))}
    if not found.keys() <= data.MIX.keys():
        raise ValueError(f"kinds are {', '.join(data.MIX)}")
    return found


def spelled(mix: Mapping[str, float]) -> str:
    """As :func:`weights` reads them."""
    return ",".join(f"{kind}={weight:g}" for kind, weight in mix.items())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer, as vLLM loads them."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(args: argparse.Namespace) -> None:
    """Run the stages and write the model, a log and a checkpoint after each evaluation."""
    torch.set_num_threads(args.threads)
    tokenizer = build()
    model = new_model(len(tokenizer), args.seed, args.head_size)
    chain = optimizers(model, args.rate)
    stages = [stage for stage in args.stages for _ in range(stage.steps)]
    args.output.mkdir(parents=True, exist_ok=True)
    checkpoint, log = args.output / "checkpoint.pt", args.output / "log.jsonl"
    first = 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(chain, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    model.train()
    since, losses = time.monotonic(), []
    bar = tqdm(range(first, len(stages)), initial=first, total=len(stages))
    for step in bar:
        length, size = stages[step].length, stages[step].size
        rate = stages[step].rate or args.rate
        # The step alone decides its data, so that a resumed run sees what an unbroken one does.
        rng = random.Random(f"{args.seed}/{step}")
        torch.manual_seed(step)
        ids, answer = data.batch(tokenizer, rng, size, length, args.mix)
        for optimizer in chain:
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(step, len(stages), args.warmup, args.decay)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids, answer)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chain:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        bar.set_postfix(length=length, loss=f"{losses[-1]:.3f}")
        if (step + 1) % args.every == 0 or step + 1 == len(stages):
            entry = {
                "step": step + 1,
                "length": length,
                "loss": round(sum(losses) / len(losses), 4),
                "interval_s": round(time.monotonic() - since),
                "accuracy": accuracy(model, tokenizer, max(256, length), args.samples),
            }
            losses.clear()
            since = time.monotonic()
            with log.open("a") as out:
                print(json.dumps(entry), file=out)
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in chain],
                    "step": step + 1,
                },
                checkpoint,
            )
            save(model, tokenizer, args.output)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    write_card(
        args.output, entries, list(map(str, args.stages)), args.samples,
        f"--seed {args.seed} --head-size {args.head_size} --rate {args.rate} "
        f"--warmup {args.warmup} --decay {args.decay} --mix {spelled(args.mix)}",
    )  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--stages", type=Stage.parse, nargs="+", metavar="LENGTHxSIZE:STEPS[@RATE]",
        default=list(map(Stage.parse, RECIPE)),
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=float, default=4e-3, help="peak learning rate of stages without their own"
    )
    parser.add_argument(
        "--mix", type=weights, default=data.MIX, metavar="KIND=WEIGHT,...",
        help=f"kinds of dialogues, of {', '.join(data.MIX)} (default: {spelled(data.MIX)})",
    )  # fmt: skip
    parser.add_argument("--warmup", type=int, default=40, help="steps of warm-up")
    parser.add_argument("--decay", type=float, default=0.25, help="share of steps that decay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--head-size", type=int, choices=(32, 64), default=32)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--samples", type=int, default=20, help="evaluation samples per task")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
