"""`python -m lib.run`."""

from __future__ import annotations

import os
import sys

from lib.run.cli import main

if __name__ == "__main__":
    # How long an idle thread of torch's OpenMP library spins before it sleeps, read when torch is loaded. At its own default
    # one other busy process on the machine makes a step seven times slower; this costs 3 % when there is none.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    sys.exit(main(sys.argv[1:]))
