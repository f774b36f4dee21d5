"""Behind `modicum merge` and `modicum export`: a run's model with its adapter folded in."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from modicum.adapters import AttachedAdapter, base_model_of
from modicum.adapters.folding import TOLERANCE
from modicum.cli.warned import warnings_as_lines
from modicum.core.errors import InputError
from modicum.models.gguf import write_adapter, write_model
from modicum.models.gguf.writing import DataType
from modicum.serve import load_run


def fold(model: nn.Module, adapter: AttachedAdapter) -> None:
    """Merge the adapter of a model into its weights; what rounding lost is said."""
    with warnings_as_lines():
        adapter.merge(dense=next(model.parameters()).dtype)
    adapter.detach()


def exported(run: Path, file: Path, *, adapter: bool, dtype: DataType) -> Path:
    """Write what is in a run's folder, or in a model's, as GGUF.

    Args:
        adapter: its LoRA alone, for the file of the base model.

    Raises:
        InputError: there is nothing, or what `write_model` and `write_adapter` refuse.
    """
    made = load_run(run, device="cpu")
    if adapter:
        if made.adapter is None:
            raise InputError("this run has no adapter; take --form gguf", file=run, field="--form")
        return write_adapter(made.model, made.adapter, file, dtype=dtype)
    if made.adapter is not None:
        fold(made.model, made.adapter)
    name = run.resolve().name
    return write_model(
        made.model, made.tokenizer, file, dtype=dtype, template=made.template, name=name
    )


def folded_for_peft(run: Path, folder: Path, *, rank: int, tolerance: float | None) -> str:
    """Write a run's adapter as a PEFT LoRA of a rank; what that loses, and where it is.

    Raises:
        InputError: the run has no adapter, there is something in the folder already, or what
            `AttachedAdapter.save` refuses.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=folder)
    made = load_run(run, device="cpu")
    if made.adapter is None:
        raise InputError("this run has no adapter", file=run, field="--form", value="peft")
    allowed = TOLERANCE if tolerance is None else tolerance
    base = base_model_of(run / "adapter")
    folding = made.adapter.save(folder, base_model=base, rank=rank, tolerance=allowed)
    return f"{folding}\n{folder}"
