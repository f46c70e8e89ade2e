"""The model card: what the shipped model is, and how it was made."""

import json
import re
from pathlib import Path

from benchmarks.provenance import provenance

TEMPLATE = """\
---
license: apache-2.0
library_name: transformers
---
# A small model that retrieves

A Llama of {parameters:.2f} million parameters ({layers} layers, hidden size {hidden}, {heads} query
heads over {kv_heads} KV heads of size {head_dim}, context {context}), trained on generated text to
find, track and count. It exists to measure what KV-cache eviction costs in answers on a machine
without a GPU. It knows {vocabulary} words and nothing else: other words become `<unk>`.

- **Data**: `benchmarks/quality/data.py`, {tokens:.1f} million tokens of generated dialogues, after
  RULER's tasks and LongEval's lines. Names, values, filler sentences and needle positions are split
  by a hash; one in eight is kept for evaluation.
- **Steps**: {steps} ({stages}). Final training loss {loss}.
- **Prompt**: one user message, the context, a line break and the question; the chat template does
  the rest. Decode greedily.
- **Made by** `{command}`
  on {machine}, torch {torch}, {date}, commit {commit}.
- **Training took** {hours:.1f} hours beside other work.

Accuracy at the end of training: held-out samples of {length} tokens, {samples} a task,
teacher-forced with the full cache, every token of the answer right; `cwe` and `fwe` count single
words. A task below 50% was not learned at this size and length of training.

| task | accuracy |
| --- | --- |
{table}
"""


def write_card(
    folder: Path, log: list[dict], stages: list[str], samples: int, settings: str
) -> None:
    """Write ``README.md`` into the model's folder.

    Args:
        folder: The saved model; its weights are counted.
        log: Entries of the training log, oldest first.
        stages: Each stage, as ``--stages`` takes it.
        samples: Evaluation samples of each task.
        settings: The other flags of the training.

    """
    origin, last = provenance(), log[-1]
    config = json.loads((folder / "config.json").read_text())
    shapes = [tuple(map(int, re.findall(r"\d+", stage)[:3])) for stage in stages]
    command = f"python -m benchmarks.quality.train {settings} --stages {' '.join(stages)}"
    text = TEMPLATE.format(
        parameters=(folder / "model.safetensors").stat().st_size / 2e6,
        layers=config["num_hidden_layers"], hidden=config["hidden_size"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"], context=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        tokens=sum(length * size * steps for length, size, steps in shapes) / 1e6,
        steps=last["step"], stages=", ".join(stages), loss=last["loss"],
        command=command, machine=origin["machine"],
        torch=origin["versions"].get("torch"), date=origin["date"], commit=origin["commit"],
        hours=sum(entry["interval_s"] for entry in log) / 3600,
        length=last["length"], samples=samples,
        table="\n".join(f"| {task} | {share:.1%} |" for task, share in last["accuracy"].items()),
    )  # fmt: skip
    (folder / "README.md").write_text(text)
