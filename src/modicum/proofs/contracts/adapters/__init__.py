"""What must hold of every adapter; importing this enters the checks into the room's battery."""

from modicum.proofs.contracts.adapters import (
    exact,
    files,
    handling,
    ledger,
    numerics,
    trace,
    training,
)

__all__ = ["exact", "files", "handling", "ledger", "numerics", "trace", "training"]
