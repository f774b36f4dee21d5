"""The composition drill: recipes drawn at random, each refused with a reason or run and checked."""

from __future__ import annotations

from modicum.proofs.drill.cases import Case, draw
from modicum.proofs.drill.drilling import Drilled, Result, drill

__all__ = ["Case", "Drilled", "Result", "draw", "drill"]
