"""How work that takes long says how far it is: the types of the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CountProgress = Callable[[int, int | None], None]
"""(done, of how many where that is known)."""
StageProgress = Callable[[str, int, int | None], None]
"""(what is being done, done, of how many where that is known)."""
Listener = Callable[[dict[str, Any]], None]
"""An event: its name under `event`, and what belongs to it."""
