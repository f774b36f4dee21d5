"""What must hold of every method of the wire; importing this enters the checks into the battery."""

from modicum.proofs.contracts.comm import exchanges, ledger, matrices, schedules, watchdogs

__all__ = ["exchanges", "ledger", "matrices", "schedules", "watchdogs"]
