"""Disk: corpora and checkpoints. Everything a run reads or writes but its logs goes through here."""

from __future__ import annotations

from lib.store.checkpoint import load, save

__all__ = ["load", "save"]
