"""Reading adapters back, whichever format a folder has them in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from modicum.adapters import model_files, native_files, peft_files
from modicum.adapters.adapted_layer import undone_on_failure
from modicum.adapters.adapter_layer import check_state
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base_weights import is_exact
from modicum.adapters.heads import put_heads, stored_heads
from modicum.adapters.names import exactly, plain_name
from modicum.adapters.native_files import StoredAdapter
from modicum.adapters.preparation import Preparation
from modicum.adapters.rewriting import restore, rewriting
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "default",
    train: bool = False,
    plugins: Iterable[str | Path] = (),
) -> AttachedAdapter:
    """Attach the adapter that a folder holds.

    That is a PEFT LoRA, one in modicum's own format, or one next to the weights of a full model,
    as `save_pretrained` and checkpoints of `transformers.Trainer` hold it. The head of a classifier
    that was trained with it comes along.

    Args:
        model: the base model, with the weights that it had before the adapter was trained.
        name: what to call it on this model; of a full model's adapters the one of this name is
            read.
        train: leave the factors trainable, to continue training; else they are frozen, to be used.
        plugins: files with methods of your own, of which the folder may name one.

    Raises:
        InputError: no such folder, files that cannot be read or are truncated, a kind of adapter
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
    stored = read_stored(Path(folder), model, name, plugins)
    attached = _attached(model, stored, name)
    for head in stored_heads(model, stored).values():
        head.requires_grad_(train)
    if not train:
        for parameter in attached.parameters():
            parameter.requires_grad_(False)
    return attached


def read_stored(
    folder: Path, model: nn.Module, name: str = "default", plugins: Iterable[str | Path] = ()
) -> StoredAdapter:
    """What a folder says of the adapter that it holds for a model.

    Raises:
        InputError: as `load`.
    """
    if (folder / native_files.CONFIG).exists():
        return native_files.read(folder, plugins)
    if not (folder / peft_files.CONFIG).exists() and model_files.files_of(folder):
        return model_files.read(folder, name, plugins)
    return peft_files.read(folder, model)


def _attached(model: nn.Module, stored: StoredAdapter, name: str) -> AttachedAdapter:
    """Attach an adapter to the layers that its targets name in full, with its tensors.

    Raises:
        InputError: they are not this adapter's, or it does not fit the model.
    """
    try:
        method = stored.method
        known = {plain_name(site.name): site.name for site in method.candidates(model)}
        names = [known.get(plain_name(each), each) for each in method.targets]
        method = method.with_fields(**exactly(known.values(), names))
        values = {known.get(key, key): value for key, value in stored.prepared.items()}
        with undone_on_failure(model, name):
            attached = AttachedAdapter(
                model,
                method,
                name=name,
                seed=stored.seed,
                start=False,
                prepared=Preparation(values),
            )
            try:
                put_heads(model, stored)
                _put(attached, stored.state, stored.base)
            except BaseException:
                restore(attached)
                raise
    except InputError as error:
        raise InputError(f"does not fit the model: {error}", file=stored.file) from None
    return attached


def _put(attached: AttachedAdapter, state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    """The adapter's tensors into it; the base is rewritten by them, or is what the folder holds."""
    own = {plain_name(key): key for key in attached.state_dict()}
    state = {own.get(key, key): tensor for key, tensor in state.items()}
    check_state(attached.state_dict(), state)
    kept = {attached.model_name(key): tensor for key, tensor in state.items()}
    if not base:
        attached.initialise(kept=kept)
    else:
        layers = rewriting(attached)
        held = {
            plain_name(f"{name}.{key}"): parameter
            for name in layers
            if not is_exact(attached.model.get_submodule(name))
            for key, parameter in attached.model.get_submodule(name).named_parameters(recurse=False)
        }
        if held.keys() != base.keys() or any(held[k].shape != t.shape for k, t in base.items()):
            raise InputError("its base is quantized, and the model's weights are kept otherwise")
        for key, parameter in held.items():
            part, before = own_part(parameter.detach())
            part.copy_(base[key][before : before + part.shape[0]])
        for name, layer in layers.items():
            layer.put({key: state[f"{name}.{key}"] for key, _ in layer.named_buffers()})
            layer.rewrote = True
    attached.load_state_dict(state)
