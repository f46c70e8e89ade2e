"""``python -m benchmarks.serving``: load over policies and KV memory (docs/dev/serving.md)."""

from benchmarks.provenance import provenance
from benchmarks.serving.options import Options
from benchmarks.serving.plots import plot
from benchmarks.serving.report import markdown, write_json
from benchmarks.serving.sweep import run


def main() -> None:
    options = Options.from_args()
    rows, origin = run(options), provenance()
    path = options.output_path
    write_json(path, options, rows, origin)
    table = path.with_suffix(".md")
    table.write_text(markdown(options, rows, origin))
    print(table.read_text())
    for written in (path, table, *plot(rows, path)):
        print(written)


if __name__ == "__main__":
    main()
