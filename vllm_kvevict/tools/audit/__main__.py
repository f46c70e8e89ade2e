"""``vllm-kvevict audit [URL]``: what the audits of a running server say. See docs/audit.md."""

import argparse
import sys
import urllib.error
import urllib.request

from vllm_kvevict.processes import guard

LOCAL = "http://127.0.0.1:8000"


def main(argv: list[str]) -> int:
    """Ask and print. Returns the exit status; errors are one sentence on stderr."""
    from vllm_kvevict.tools.audit.table import lines, read

    parser = argparse.ArgumentParser(
        prog="vllm-kvevict audit", description="What the audits of a running server say."
    )
    parser.add_argument("url", nargs="?", default=LOCAL, help=f"the server (default: {LOCAL})")
    url = parser.parse_args(argv).url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            summary = read(answer.read().decode())
    except (urllib.error.URLError, ValueError, OSError) as error:
        print(f"error: {url} cannot be read: {error}", file=sys.stderr)
        return 1
    if not summary.audits:
        print(
            f"error: {url} has no audits: start the server with --kv-eviction-audit 1%, or wait "
            f"for an eviction of a request that is drawn ({summary.evictions:.0f} evictions so "
            "far)",
            file=sys.stderr,
        )
        return 1
    print("\n".join(lines(summary)))
    return 0


if __name__ == "__main__":
    guard()
    sys.exit(main(sys.argv[1:]))
