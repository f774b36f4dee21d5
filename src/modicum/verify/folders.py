"""A folder that was made of a run, as a model: a model's, an adapter's, or another run's."""

from __future__ import annotations

from pathlib import Path

from modicum.adapters import base_model_of, load
from modicum.core.errors import InputError
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.serve import Conversation, load_run
from modicum.trainer.restoring import FinishedRun

_ADAPTERS = ("adapter_config.json", "modicum_adapter.json")


def loaded(folder: Path, done: FinishedRun, device: str) -> Conversation:
    """The model in a folder; an adapter on the base that it names, or on the run's where that is
    not a folder here.

    A folder without a tokenizer is taken to use the run's.

    Raises:
        InputError: it holds no model.
    """
    if not folder.is_dir():
        raise InputError("no such folder", file=folder, field="--against")
    own = Tokenizer.load(done.folder.path / "tokenizer")
    if any((folder / name).is_file() for name in _ADAPTERS):
        named = base_model_of(folder)
        base = Path(named) if named and Path(named).is_dir() else done.base
        if base is None:
            raise InputError("the adapter's base model is not there", file=folder, value=named)
        model = huggingface.load(base, device=device)
        adapter = load(model, folder)
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else own
        return Conversation(model.eval(), tokenizer, adapter)
    if (folder / "run.json").is_file() or (folder / "tokenizer.json").is_file():
        return load_run(folder, device=device)
    return Conversation(huggingface.load(folder, device=device).eval(), own)
