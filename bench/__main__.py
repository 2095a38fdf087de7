"""`python -m bench NAME [key=value ...]`: run one benchmark, append its lines to bench/history.jsonl, print the last five."""

from __future__ import annotations

import importlib
import sys

from bench.harness import last_lines

NAMES = ("step", "optimizer", "mesh", "compile", "data", "checkpoint")


def main(arguments: list[str]) -> int:
    """Run the benchmark named first; the rest are its settings."""
    if not arguments or arguments[0] not in NAMES:
        print(f"usage: python -m bench {{{','.join(NAMES)}}} [key=value ...]", file=sys.stderr)
        return 2
    name, *rest = arguments
    settings = dict(item.split("=", 1) for item in rest)
    importlib.import_module(f"bench.{name}").run(**settings)
    for line in last_lines(name, 5):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
