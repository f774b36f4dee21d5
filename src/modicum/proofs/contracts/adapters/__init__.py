"""What must hold of every adapter; importing this enters the checks into the room's battery."""

from modicum.proofs.contracts.adapters import (
    convolutions,
    copies,
    diagnoses,
    exact,
    files,
    generated,
    handling,
    ledger,
    numerics,
    patches,
    rows,
    slices,
    steps,
    trace,
    training,
)

__all__ = [
    "convolutions",
    "copies",
    "diagnoses",
    "exact",
    "files",
    "generated",
    "handling",
    "ledger",
    "numerics",
    "patches",
    "rows",
    "slices",
    "steps",
    "trace",
    "training",
]
