"""Reading adapters back, whichever format a folder has them in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from modicum.adapters import model_files, own_files, peft_files

if TYPE_CHECKING:
    from modicum.adapters.attached import AttachedAdapter


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "default",
    train: bool = False,
    plugins: Iterable[str | Path] = (),
) -> AttachedAdapter:
    """Attach the adapter that a folder holds.

    That is a PEFT LoRA, one in modicum's own format, or one next to the weights of a whole model,
    as `save_pretrained` and checkpoints of `transformers.Trainer` hold it.

    Args:
        model: the base model, with the weights that it had before the adapter was trained.
        name: what to call it on this model; of a whole model's adapters the one of this name is
            read.
        train: leave the factors trainable, to go on; else they are frozen, to be used.
        plugins: files with methods of your own, of which the folder may name one.

    Raises:
        InputError: no such folder, files that cannot be read or are cut off, a kind of adapter
            that is not plain LoRA (which, and why), or one of another model.

    >>> import tempfile, torch
    >>> from modicum.adapters import LoRA, load
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     LoRA(rank=1).attach(model).save(f"{folder}/adapter")
    ...     other = load(torch.nn.Sequential(torch.nn.Linear(4, 2)), f"{folder}/adapter")
    >>> other.method.rank
    1
    """
    path = Path(folder)
    if (path / own_files.CONFIG).exists():
        attached = own_files.load(model, path, name=name, plugins=plugins)
    elif not (path / peft_files.CONFIG).exists() and model_files.files_of(path):
        attached = model_files.load(model, path, name=name, plugins=plugins)
    else:
        attached = peft_files.load(model, path, name=name)
    if not train:
        for parameter in attached.parameters():
            parameter.requires_grad_(False)
    return attached
