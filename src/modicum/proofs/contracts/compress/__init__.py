"""What must hold of every compressor; importing this enters the checks into the room's battery."""

from modicum.proofs.contracts.compress import exact, handling, ledger, pruning, training

__all__ = ["exact", "handling", "ledger", "pruning", "training"]
