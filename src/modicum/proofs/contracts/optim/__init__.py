"""What must hold of every method of the room; importing this enters the checks into its battery."""

from modicum.proofs.contracts.optim import (
    ledger,
    programs,
    protocols,
    row_meanings,
    skipped,
    state,
    training,
    transforms,
    updates,
)

__all__ = [
    "ledger",
    "programs",
    "protocols",
    "row_meanings",
    "skipped",
    "state",
    "training",
    "transforms",
    "updates",
]
