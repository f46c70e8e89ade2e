"""Runs under Triton's interpreter: a model with recurrent layers, under Model Runner V2."""

import json
import sys
from pathlib import Path

from tests.e2e import test_hybrids
from tests.e2e.architectures import MaskedArchitecture, architecture
from tests.oracles.engine import engine


def main(name: str, folder: Path) -> None:
    path = architecture(name, folder)
    with engine(path, test_hybrids.EVICTION) as run:
        free = run.free_blocks()
        test_hybrids.check(MaskedArchitecture(path), run)
        result = dict(
            runner=type(run.worker.model_runner).__module__,
            state=type(run.worker.model_runner.model_state).__name__,
            blocks_leaked=free - run.free_blocks(),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
