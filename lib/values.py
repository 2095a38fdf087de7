"""What every Struct of a choice is made of: checks on construction, and numbers with their ranges. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from lib.settings import check_ranges

__all__ = ["Checked", "Count", "Natural", "Positive", "Share"]

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class Checked(Struct, frozen=True, forbid_unknown_fields=True):
    """Checks ranges on construction; `_at` is where the Struct stands in a config, for the errors."""

    _at: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self, self._at)
