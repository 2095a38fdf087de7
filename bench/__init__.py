"""Speed with a history: ours against a baseline, interleaved in one process, reported as a ratio."""
