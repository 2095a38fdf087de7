"""`python -m lib.run`."""

from __future__ import annotations

import sys

from lib.run.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
