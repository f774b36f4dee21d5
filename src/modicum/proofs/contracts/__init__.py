"""The batteries: what must hold of every method of a room, whoever wrote it."""

from __future__ import annotations

from modicum.proofs.contracts.base import BATTERIES, CheckResult, checks, run_battery

__all__ = ["BATTERIES", "CheckResult", "checks", "run_battery"]
