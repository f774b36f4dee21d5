"""Behind `modicum merge` and `modicum export`: a run's model with its adapter folded in."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from modicum.adapters import AttachedAdapter, base_model_of
from modicum.adapters.folding import TOLERANCE
from modicum.cli.warned import warnings_as_lines
from modicum.core.errors import InputError
from modicum.models.gguf import write_adapter, write_model
from modicum.models.gguf.writing import DataType
from modicum.serve import load_run
from modicum.tasks.text import TextData
from modicum.trainer.restoring import FinishedRun

# Of a run's validation data, how much is looked at to say what folding does to logits.
_ROWS, _TOKENS = 8, 256


def fold(model: nn.Module, adapter: AttachedAdapter) -> None:
    """Merge the adapter of a model into its weights; what rounding lost is said."""
    with warnings_as_lines():
        adapter.merge(dense=next(model.parameters()).dtype)
    adapter.detach()


def exported(
    run: Path, file: Path, *, adapter: bool, dtype: DataType, trusted: bool = False
) -> Path:
    """Write what is in a run's folder, or in a model's, as GGUF.

    Args:
        adapter: its LoRA alone, for the file of the base model.
        trusted: whether code of the model's folder is run, as `load_run` takes it.

    Raises:
        InputError: there is nothing, or what `write_model` and `write_adapter` refuse.
    """
    made = load_run(run, device="cpu", trust_remote_code=trusted)
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


def folded_for_peft(
    run: Path, folder: Path, *, rank: int, tolerance: float | None, trusted: bool = False
) -> str:
    """Write a run's adapter as a PEFT LoRA of a rank; what that loses, and where it is.

    Raises:
        InputError: the run has no adapter, there is something in the folder already, or what
            `AttachedAdapter.save` refuses.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError("there is something already; give --out a new folder", file=folder)
    made = load_run(run, device="cpu", trust_remote_code=trusted)
    if made.adapter is None:
        raise InputError("this run has no adapter", file=run, field="--form", value="peft")
    batches, why = None, ""
    try:
        batches = held_out(run)
    except InputError as error:
        why = f"\nits logits were not compared: {error}"
    folding = made.adapter.save(
        folder,
        base_model=base_model_of(run / "adapter"),
        rank=rank,
        tolerance=TOLERANCE if tolerance is None else tolerance,
        batches=batches,
    )
    return f"{folding}{why}\n{folder}"


def held_out(run: Path) -> list[Tensor]:
    """Token ids [1, length] of the first rows of a run's validation data.

    Raises:
        InputError: the run has not finished, or it has no such data, or no longer.
    """
    with FinishedRun.of(run).data(lambda *_: None) as data:
        if not isinstance(data, TextData) or data.validation is None:
            raise InputError("the run has no validation data", file=run)
        rows = data.validation
        first = range(min(_ROWS, len(rows)))
        return [rows.batch([row]).input_ids[:, :_TOKENS] for row in first]
