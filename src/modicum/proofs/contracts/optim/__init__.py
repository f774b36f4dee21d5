"""What must hold of every method of the room; importing this enters the checks into its battery."""

from modicum.proofs.contracts.optim import spending, state, training, transforms, updates

__all__ = ["spending", "state", "training", "transforms", "updates"]
