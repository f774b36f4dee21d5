"""Reading adapters back, whichever format a folder has them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from modicum.adapters import model_files, native_files, peft_files, peft_formats
from modicum.adapters.adapted_layer import undone_on_failure
from modicum.adapters.adapter_layer import check_shape, check_state
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.attaching import check_name
from modicum.adapters.base import Adapter, ReadWeight
from modicum.adapters.base_weights import is_exact
from modicum.adapters.factors import Factor, Generated
from modicum.adapters.names import exactly, plain_name
from modicum.adapters.native_files import StoredAdapter, taken_as
from modicum.adapters.preparation import Preparation
from modicum.adapters.rewriting import restore, rewriting
from modicum.adapters.sites import Site
from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "default",
    train: bool = False,
    method: str | None = None,
    plugins: Iterable[str | Path] = (),
    weights: ReadWeight | None = None,
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
        method: which one to continue a LoRA as, by its name in the catalog; None: as what it is.
        plugins: files with methods of your own, of which the folder may name one.
        weights: gives the full-precision weight of a layer by its name; a method that derives its
            tensors from the weight asks for it where the base is quantized.

    Raises:
        InputError: no such folder, files that cannot be read or are truncated, a kind of adapter
            that is not plain LoRA (which, and why), one of another model, or the name is taken.

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
    if method is not None:
        kind = find(method, plugins, room="adapters").load()
        assert issubclass(kind, Adapter)
        stored = taken_as(stored, kind)
    attached = _attached(model, stored, name, weights)
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
    return peft_formats.read(folder, model)


def _attached(
    model: nn.Module, stored: StoredAdapter, name: str, weights: ReadWeight | None
) -> AttachedAdapter:
    """Attach an adapter to the layers that its targets name in full, with its tensors.

    Raises:
        InputError: the name is taken; they are not this adapter's, or it does not fit the model.
    """
    check_name(model, name)  # what fails below takes off the adapter of this name
    try:
        method = stored.method
        known = {plain_name(site.name): site.name for site in method.candidates(model)}
        names = [known.get(plain_name(each), each) for each in method.targets]
        method = method.with_fields(**exactly(known.values(), names))
        values = {known.get(key, key): value for key, value in stored.prepared.items()}
        sites = [replace(s, prepared=values.get(s.name, {})) for s in method.sites(model)]
        check_factors(method, sites, stored.state)
        with undone_on_failure(model, name):
            attached = AttachedAdapter(
                model,
                method,
                name=name,
                seed=stored.seed,
                weights=weights,
                start=False,
                prepared=Preparation(values),
            )
            try:
                _put(attached, stored.state, stored.base)
            except BaseException:
                restore(attached)
                raise
    except InputError as error:
        raise InputError(f"does not fit the model: {error}", file=stored.file) from None
    return attached


def check_factors(method: Adapter, sites: Sequence[Site], state: Mapping[str, Tensor]) -> None:
    """Make sure that a state has a method's tensors, before there is memory for any.

    A number in a damaged file may ask for more of it than there is.

    Args:
        state: by plain names.

    Raises:
        InputError: it lacks one, or one has another shape or kind, or values that are not finite.
    """
    needed: dict[str, Factor] = {}
    for site in sites:
        own = {**method.factors(site), **method.frozen(site)}
        needed |= {f"{plain_name(site.name)}.{key}": factor for key, factor in own.items()}
    common = {**method.shared(sites), **method.shared_frozen(sites)}
    needed |= {f"shared.{key}": factor for key, factor in common.items()}
    for name, stored in state.items():
        if stored.is_complex():
            raise InputError("is of another kind", field=name, value=str(stored.dtype))
    for name, factor in needed.items():
        if isinstance(factor, Generated):
            continue
        if (tensor := state.get(name)) is None:
            raise InputError("it lacks a factor of this method", field=name)
        check_shape(name, factor.shape, tensor)
        if tensor.dtype.is_floating_point != factor.dtype.is_floating_point:
            raise InputError("is of another kind", field=name, value=str(tensor.dtype))
        if not tensor.float().isfinite().all():
            raise InputError("has values that are not finite", field=name)
    method.check_kept(sites, state)


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
            layer.put({key: state[f"{name}.{key}"] for key, _ in layer.kept_buffers()})
            layer.rewrote = True
    attached.load_state_dict(state)
