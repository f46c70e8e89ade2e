"""Checks each call of the queue against the limits of the GPU machine.

``python -m benchmarks.gpu.transfers``. A call is one command on a copy of the working tree: tracked
files, others that git does not ignore, and the ignored folders that the call carries. It prints the
command, the folders and the bytes of each call, and fails if one is beyond a limit.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 64 * 2**20
PREPARED = {".gpu/one": 56_500_000, ".gpu/two": 50_000_000, ".gpu/three": 50_200_000}
"""Bytes of the folders that prepare.sh makes, rounded up. The first one is an estimate: the archive
of vLLM and its packages had 56 MB with Mistral's tokenizers, which are left out now and had some
4 MB. The extension has 4 MB, and half of the model 50 MB."""
MOST_CHARACTERS = 2000
MOST_FOLDERS = 8


@dataclass(frozen=True)
class Call:
    """One command of the queue, and the ignored folders that must come with it."""

    script: str
    seconds: int
    carried: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return f'OUT="$OUT" SECONDS_={self.seconds} bash benchmarks/gpu/queue/{self.script}.sh'


QUEUE = (
    Call("1_kernels", 220, (".gpu/one",)),
    Call("2_admission", 230, (".gpu/two",)),
    Call("3_models", 130, (".gpu/three",)),
    Call("4_networks", 120),
)


def tree_bytes(root: Path = ROOT) -> int:
    """Bytes of the files that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.split(b"\0")
    paths = [root / name.decode() for name in set(names) if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def problems(call: Call, root: Path = ROOT, tree: int | None = None) -> list[str]:
    """Return the limits of the machine that a call exceeds, and the folders that are missing."""
    size = tree_bytes(root) if tree is None else tree
    found = []
    for name in call.carried:
        if not (root / name).is_dir():
            found.append(f"{name} is missing: run benchmarks/gpu/prepare.sh")
        size += folder_bytes(root / name)
    if size > MOST_BYTES:
        found.append(f"{size:,} bytes are more than {MOST_BYTES:,}")
    if len(call.command) >= MOST_CHARACTERS:
        found.append(f"the command has {len(call.command)} characters")
    if len(call.carried) > MOST_FOLDERS:
        found.append(f"{len(call.carried)} folders")
    return [f"{call.script}: {problem}" for problem in found]


def main(calls: Sequence[Call] = QUEUE) -> None:
    tree, wrong = tree_bytes(), []
    for call in calls:
        size = tree + sum(folder_bytes(ROOT / name) for name in call.carried)
        print(f"{call.command}\n    {size:,} bytes, carry: {', '.join(call.carried) or 'nothing'}")
        wrong += problems(call, ROOT, tree)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
