"""What must hold of every policy on activations; importing this enters the checks."""

from modicum.proofs.contracts.memory import exact, running, traced

__all__ = ["exact", "running", "traced"]
