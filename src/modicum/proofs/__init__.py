"""Evidence: one small experiment a method, and one battery of checks a room."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.proofs.base import ProofRun, prove, write
    from modicum.proofs.contracts.base import CheckResult, run_battery
    from modicum.proofs.proof import Proof

_HOMES = {
    "CheckResult": "contracts.base",
    "Proof": "proof",
    "ProofRun": "base",
    "prove": "base",
    "run_battery": "contracts.base",
    "write": "base",
}
__all__ = ["CheckResult", "Proof", "ProofRun", "prove", "run_battery", "write"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
