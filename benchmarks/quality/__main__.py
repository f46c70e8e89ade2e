"""What each policy and budget costs in answers: see docs/quality.md.

python -m benchmarks.quality [--samples 200] [--base-url http://127.0.0.1:8000 --model NAME] ...
"""

from collections.abc import Sequence

from benchmarks.quality.options import Options
from benchmarks.quality.report import write
from benchmarks.quality.results import summarize
from benchmarks.quality.run import gather


def main(arguments: Sequence[str] | None = None) -> None:
    options = Options.parse(arguments)
    gathered = gather(options)
    write(gathered, summarize(gathered.scores(), options.threshold))


if __name__ == "__main__":
    main()
