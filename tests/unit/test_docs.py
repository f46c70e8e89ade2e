"""Pages link to what is there, and the index has every page."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("deploy/*.md"),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


INSTALLS = re.compile(
    r"pip3? install[^\n`]*?[\s'\"](vllm[-_]kvevict(?![\w*.-]*\.(?:whl|tar))[^\s]*)"
)


def test_nobody_is_told_to_install_an_unregistered_name() -> None:
    """The package is on no index, where a stranger could register it: files and folders alone."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = [
        f"{name}: {told}"
        for name in tracked
        if name != "tests/unit/test_docs.py"
        and name.endswith((".md", ".py", ".sh", ".toml", ".yaml", "Dockerfile", "Makefile"))
        for told in INSTALLS.findall((ROOT / name).read_text())
    ]
    assert not found


@pytest.mark.parametrize("line", [
    "pip install vllm-kvevict", "pip install 'vllm-kvevict[inspect]'", "pip install vllm-kvevict.",
    "pip install vllm vllm-kvevict==0.1.0", "pip3 install -U vllm_kvevict",
])  # fmt: skip
def test_such_a_line_is_found(line: str) -> None:
    assert INSTALLS.search(line)
    assert not INSTALLS.search("pip install dist/vllm_kvevict-0.1.0-py3-none-any.whl")
    assert not INSTALLS.search("pip install dist/vllm_kvevict-*.tar.gz")


@pytest.mark.parametrize("folder", ["docs", "docs/dev"])
def test_the_index_has_every_page(folder: str) -> None:
    index = ROOT / folder / "README.md"
    links = LINK.findall(index.read_text())
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links}
    assert {page.resolve() for page in index.parent.glob("*.md")} - {index} <= listed
