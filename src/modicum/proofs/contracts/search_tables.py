"""What must hold of the search table of every method; importing this enters it for all rooms."""

from __future__ import annotations

from modicum.core.contracts.method import Method
from modicum.core.contracts.search_check import RECIPE_FIELDS
from modicum.core.errors import InputError
from modicum.proofs.contracts.base import BATTERIES, check

_SLOTS = {
    "adapters": ("", "diagnosis"),
    "comm": ("", "watchdog"),
    "optim": ("optimizer", "transform"),
}
_TRIED = 9  # values of a range


def without_a_table(subject: type[Method] | Method) -> str | None:
    """Why nothing is said of a method: it has no table of its own."""
    if subject.search is not None:
        return None
    return "the method has no search table of its own, and its room's names fields of recipes alone"


def check_search_table(subject: type[Method] | Method) -> None:
    """Each value of a range of its search table is one that it takes, other fields by default."""
    kind = subject if isinstance(subject, type) else type(subject)
    assert kind.search is not None
    needed = {
        name: value
        for name, value in kind.info.tiny.items()
        if name in kind.model_fields and kind.model_fields[name].is_required()
    }
    for name, known in kind.search.fields.items():
        for value in () if name in RECIPE_FIELDS else known.grid(_TRIED):
            try:
                kind(**{**needed, name: value})
            except InputError as error:
                raise AssertionError(
                    f"the search table has {name} {value!r}, and the method refuses it: {error}"
                ) from None


for _room in BATTERIES:
    for _slot in _SLOTS.get(_room, ("",)):
        check(_room, slot=_slot, refuses=without_a_table)(check_search_table)
