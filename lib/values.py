"""What every Struct of a choice is made of: checks on construction, and numbers with their ranges. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from lib.settings import check_ranges

__all__ = ["Checked", "Count", "Natural", "Positive", "Share", "check_used", "shown"]

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class Checked(Struct, frozen=True, forbid_unknown_fields=True):
    """Checks ranges on construction; `_at` is where the Struct stands in a config, for the errors."""

    _at: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self, self._at)

    def sets(self, name: str) -> bool:
        """Whether a field says something else than its default."""
        default = self.__struct_defaults__[self.__struct_fields__.index(name)]
        return bool(getattr(self, name) != default)


def check_used(value: Checked, by: str, table: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """Refuse fields that the choice in the field `by` does not read.

    Args:
        value: a Struct.
        by: its field that decides which others are read.
        table: (field, choices that read it).

    Raises:
        ValueError: a field is set, and the choice does not read it.
    """
    choice = getattr(value, by)
    for name, choices in table:
        if choice not in choices and value.sets(name):
            raise ValueError(
                f"{value._at}{name}={shown(getattr(value, name))} must not go with {value._at}{by}={choice} "
                f"(it is for {', '.join(choices)}); drop one"
            )


def shown(value: Any) -> str:
    """A value as a config writes it."""
    return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)
