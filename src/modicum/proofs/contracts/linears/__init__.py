"""What must hold of every linear form; importing this enters the checks into the room's battery."""

from modicum.proofs.contracts.linears import exact, handling, ledger, training

__all__ = ["exact", "handling", "ledger", "training"]
