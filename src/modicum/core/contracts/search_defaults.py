"""What each room says may be tuned of all its methods; a method's own table comes before it.

Ranges are wide: they hold the best rates of models of a few thousand parameters and of a few
billion. A rate that is best at an end asks for a wider one (`SearchTable`'s ranges have `widened`).
"""

from __future__ import annotations

from modicum.core.contracts.method import Info
from modicum.core.contracts.search import LinearRange, LogRange, SearchTable

_NOTHING = SearchTable()
_DECAY = LinearRange(0.0, 0.1, 0.0)
_OF_A_TRAINED_MODEL = SearchTable(
    {
        "learning_rate": LogRange(1e-5, 1e-2, 1e-4),
        "warmup": LinearRange(0.0, 0.2, 0.03),
        "weight_decay": _DECAY,
    }
)
_OF_A_NEW_MODEL = SearchTable(
    {
        "learning_rate": LogRange(1e-5, 1e-2, 1e-3),
        "warmup": LinearRange(0.0, 0.2, 0.05),
        "weight_decay": LinearRange(0.0, 0.3, 0.0),
    }
)
# Of what keeps the arithmetic of a run, or nearly, the rate alone is worth a search.
_RATE_ALONE = SearchTable({"learning_rate": LogRange(1e-5, 1e-2, 1e-3)})

# By room, or by the section of the recipe where a room has several. Rooms that no section of a
# recipe is for have nothing that a run can tune, and neither diagnosis nor watchdog changes any.
_TABLES = {
    # An adapter takes about ten times the rate of full training ("LoRA Without Regret", 2025).
    "adapters": SearchTable(
        {
            "learning_rate": LogRange(1e-4, 1e-1, 1e-3),
            "warmup": LinearRange(0.0, 0.2, 0.03),
            "weight_decay": _DECAY,
        }
    ),
    "diagnosis": _NOTHING,
    "watchdog": _NOTHING,
    "protocol": _NOTHING,  # it tunes others
    "optim": _OF_A_NEW_MODEL,
    "compress": _OF_A_TRAINED_MODEL,
    "linears": _OF_A_NEW_MODEL,
    "memory": _RATE_ALONE,
    "comm": _RATE_ALONE,
    "tasks": _OF_A_NEW_MODEL,
}


def room_search(info: Info) -> SearchTable:
    """The search table of all methods of a room, or of its section of the recipe.

    >>> from modicum.core.contracts.method import Info
    >>> list(room_search(Info("a", "A", "adapters", "", "")).fields)
    ['learning_rate', 'warmup', 'weight_decay']
    """
    if "takes_no_rate" in info.traits:
        return _NOTHING
    return _TABLES.get(info.slot) or _TABLES.get(info.room, _NOTHING)
