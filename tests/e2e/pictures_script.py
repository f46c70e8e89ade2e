"""Runs in a process of its own, with torchvision: images before, across and behind evictions."""

import json
import sys
from pathlib import Path

import torch

# Package indexes have it for CUDA only; it describes these two, which a build for CPUs lacks.
TORCHVISION = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    TORCHVISION.define(f"{operator}(Tensor boxes) -> Tensor")

from tests.e2e.pictures import MaskedTower, picture, shown, with_tower  # noqa: E402
from tests.oracles.engine import engine  # noqa: E402
from tests.oracles.masked import Life, check_tokens  # noqa: E402

EVICTION = dict(policy="ada-snapkv", budget=128, interval=64)
PROMPTS = [shown(400, 1, (30, 250)), shown(300, 2, (270,))]
IMAGES = [[picture(1), picture(2)], [picture(3)]]
NEW_TOKENS = 80
# Behind the first image; inside the image.
AT = [{"kv_eviction_at": 201}, {"kv_eviction_at": 277}]


def main(name: str, path: Path) -> None:
    from vllm.model_executor.models import registry

    # Another process would not have the two operators.
    registry._run_in_subprocess = lambda function: function()
    oracle = MaskedTower(with_tower(name, path))
    options = dict(
        # The CPU build has linear attention in bfloat16 only.
        dtype="bfloat16" if name == "Qwen3_5" else "float32",
        limit_mm_per_prompt={"image": 2, "video": 0},
        max_model_len=1024,
    )
    result: dict[str, list[int]] = dict(right=[], full=[], evictions=[], leaked=[])
    for asked, chunk in ((None, 1024), (None, 128), (AT, 256)):
        with engine(path, EVICTION, max_num_batched_tokens=chunk, **options) as run:
            free = run.free_blocks()
            outputs = run.generate(
                PROMPTS, NEW_TOKENS, asked, media=[{"image": shown} for shown in IMAGES]
            )
            right = full = 0
            for tokens, output, lives, images in zip(
                run.prompts, outputs, run.lives(), IMAGES, strict=True
            ):
                oracle.pictures = images
                right += check_tokens(oracle, tokens, output, lives)[0]
                full += check_tokens(oracle, tokens, output, [Life(len(tokens))])[0]
            result["right"].append(right)
            result["full"].append(full)
            result["evictions"].append(run.counters.evictions)
            result["leaked"].append(free - run.free_blocks())
    print(json.dumps(result | dict(total=len(PROMPTS) * NEW_TOKENS)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
