"""What each policy and budget costs in answers: see docs/quality.md.

python -m benchmarks.quality [--samples 200] [--base-url http://127.0.0.1:8000 --model NAME] ...
"""

import sys

from benchmarks.quality.options import Options
from benchmarks.quality.run import run

if __name__ == "__main__":
    sys.exit(run(Options.parse()))
