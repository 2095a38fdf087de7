"""The laws of a training state, as something to run on a step of one's own.

check_step(step, state, batches)    raises LawError: which law is broken, where, by which smallest input
"""

from __future__ import annotations

from lib.testing.case import Case, Verdict
from lib.testing.check import LAWS, LawError, check_step, examine

__all__ = ["LAWS", "Case", "LawError", "Verdict", "check_step", "examine"]
