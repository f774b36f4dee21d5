"""Model folders in Hugging Face's format, config.json and safetensors, as they are read.

Reading a configuration or checking a folder needs no torch, so that a plan is made in a moment;
`load` imports it. Pickled weights are refused: unpickling runs what a stranger wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan
from modicum.models.config import ModelConfig
from modicum.models.decoder_config import DecoderConfig, decoder_config
from modicum.models.generation_settings import note_generation
from modicum.models.other_folders import no_model
from modicum.models.package_folders import in_package, package_folder
from modicum.models.safetensors_file import TensorEntry, find_tensors, read_tensor
from modicum.models.stored_tensor import check_stored

if TYPE_CHECKING:
    import torch
    from torch import nn

    from modicum.models.decoders import Decoder
    from modicum.models.transformers.names import ConvertedTensor

CONFIG = "config.json"
_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TORCH_NAMES = {name: own for own, name in _NAMES.items()}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED = 8192  # rows of an embedding at a time


@dataclass(frozen=True)
class ModelHeader:
    """A model folder that was checked: its configuration, and where each tensor lies.

    Args:
        tied: the output layer's weight, where the files repeat it next to the embedding's, which it
            is by config.json.
        exact: parameters and buffers that the model keeps in fp32, whatever dtype others have.
    """

    folder: Path
    config: DecoderConfig
    tensors: dict[str, TensorEntry | ConvertedTensor]
    tied: TensorEntry | None = None
    exact: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """The weights' size as stored."""
        return sum(entry.bytes for entry in self.tensors.values())

    @property
    def dtypes(self) -> frozenset[str]:
        """The format's names (F32, BF16...) of the dtypes that there are, or config.json names.

        Integers do not count, nor what is in fp32 next to any dtype.
        """
        if self.tensors:
            counted = (self.tensors[name].dtype for name in self.tensors.keys() - self.exact)
            return frozenset(counted) & {*_NAMES.values()}
        raw = read_json(self.folder / CONFIG)
        named = str(raw.get("dtype", raw.get("torch_dtype"))).removeprefix("torch.")
        return frozenset({_NAMES[named]} if named in _NAMES else ())

    @property
    def dtype(self) -> str:
        """The format's name (F32, BF16...) of the narrowest dtype that holds each exactly."""
        found = set(self.dtypes) if self.tensors else set[str]()
        return found.pop() if len(found) == 1 else "F64" if "F64" in found else "F32"


def resolve(path: str | Path) -> Path:
    """The model folder that `path` means: itself, the `model` folder of a run, or a package's.

    Raises:
        InputError: there is no such folder or package, or it is a file.
    """
    folder = package_folder(path) if in_package(path) else Path(path)
    if folder.is_file():
        own = (folder.parent / CONFIG).is_file()
        hint = f"; give its folder, {folder.parent}" if own else ""
        problem = f"a model is a folder with a config.json, and this is a file{hint}"
        raise InputError(problem, file=folder)
    if not folder.is_dir():
        raise InputError(
            "there is no such folder; a recipe names a model of the Hugging Face hub as "
            f"hub:{_hub_name(path)}, and `hf download NAME --local-dir FOLDER` makes a folder",
            value=str(folder),
        )
    inner = folder / "model"
    return inner if not (folder / CONFIG).exists() and (inner / CONFIG).exists() else folder


def _hub_name(path: str | Path) -> str:
    """The model of the hub that was meant, where `path`, seen from here, looks like one."""
    with suppress(ValueError, OSError):
        path = Path(path).relative_to(Path.cwd())  # a recipe's paths are absolute by now
    return str(path) if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) else "OWNER/NAME"


def read_config(folder: str | Path) -> DecoderConfig:
    """The configuration of a model folder or of a run's model.

    Raises:
        InputError: there is no config.json, it cannot be read, or it asks for what is not
            supported.
    """
    file = resolve(folder) / CONFIG
    if not file.is_file():
        raise no_model(file.parent)
    return decoder_config(read_json(file), file)


def read_header(folder: str | Path) -> ModelHeader:
    """Check a model folder without reading its weights: complete files, all tensors, right shapes.

    Raises:
        InputError: the folder is no model, a file is missing, truncated or no safetensors, or a
            tensor is missing, unknown, or of the wrong shape or type.
    """
    folder = resolve(folder)
    config = read_config(folder)
    found = find_tensors(folder)
    if isinstance(config, ModelConfig):
        tied = found.pop(_HEAD, None) if config.tied_embeddings else None
        if tied is not None:
            check_stored(_HEAD, tied, config.parameter_shapes()[_EMBEDDING])
        return ModelHeader(folder, config, _placed(config, found, folder), tied)
    from modicum.core.layers.meta import on_meta
    from modicum.models.transformers.buffers import exact_tensors
    from modicum.models.transformers.model import build
    from modicum.models.transformers.names import placed

    with on_meta():
        model = build(config)
    return ModelHeader(folder, config, placed(model, found, folder), exact=exact_tensors(model))


def _placed(
    config: ModelConfig, found: dict[str, TensorEntry], folder: Path
) -> dict[str, TensorEntry | ConvertedTensor]:
    """The built-in decoder's tensors, by the names that they have in files too."""
    tensors: dict[str, TensorEntry | ConvertedTensor] = {}
    indices = config.index_shapes()
    shapes = {**config.parameter_shapes(), **indices, **config.resting_shapes()}
    for name, shape in shapes.items():
        entry = found.pop(name, None)
        if entry is None:
            raise InputError(
                "the weights lack a tensor that config.json calls for",
                file=folder,
                field=name,
                candidates=found,
                word=name,
            )
        check_stored(name, entry, shape, integers=name in indices)
        tensors[name] = entry
    for name, entry in found.items():
        if not name.endswith("rotary_emb.inv_freq"):  # tables that old files keep
            raise InputError(
                "the built-in model has no place for this tensor", file=entry.file, field=name
            )
    return tensors


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    linear: str | FormPlan = "dense",
) -> Decoder:
    """The model in `folder`, streamed: at its peak, the model and one tensor more.

    Args:
        dtype: of all parameters but those that the model keeps in fp32; None: as they are stored,
            or where that differs from tensor to tensor the one that holds all of them exactly.
        linear: the form that every projection takes, each made from its full weight; those that
            the folder holds in a form of their own keep it. Or the plan of forms, which has those;
            blocks are what they are in the folder.

    Raises:
        InputError: as `read_header`, or no linear form has that name, or the files hold an output
            layer that is not the embedding, which it is by config.json.
    """
    import torch

    from modicum.core.layers.full_model import FullModel, note_full_model
    from modicum.core.layers.linear_forms import linear_form
    from modicum.core.layers.meta import on_meta
    from modicum.models.llama import Llama

    header = read_header(folder)
    if not isinstance(header.config, ModelConfig):
        from modicum.models.transformers.loading import empty_decoder

        empty = empty_decoder(header.config, header.dtype, dtype, device, linear)
        fill(empty, folder)
        return empty
    _check_tied(header)
    if dtype is None and len(header.dtypes) > 1:
        dtype = getattr(torch, _TORCH_NAMES[header.dtype])
    held = header.config.forms
    plan = linear if isinstance(linear, FormPlan) else held.with_default(linear)
    plan = replace(plan, blocks=held.blocks)

    def read(path: str, leaf: str) -> torch.Tensor:
        # A quantized weight is made of the full-precision one.
        coded = path.endswith("_proj") and leaf == "weight"
        coded = coded and not linear_form(plan.of(path).name).trains
        tensor = _read_rows(header, f"{path}.{leaf}")
        return tensor.to(device=device, dtype=None if coded else dtype, copy=True)

    with on_meta():
        model = Llama(header.config)
    for path, module in list(model.named_modules()):
        own = {leaf: read(path, leaf) for leaf, _ in module.named_parameters(recurse=False)}
        if path.endswith("_proj") and isinstance(module, torch.nn.Linear):
            form = linear_form(plan.of(path).name)
            arguments = plan.of(path).arguments
            made = form.from_dense(own["weight"], own.get("bias"), **arguments)
            model.set_submodule(path, made)
        else:
            for leaf, tensor in own.items():
                setattr(module, leaf, torch.nn.Parameter(tensor))
            for leaf, buffer in module.named_buffers(recurse=False):
                if f"{path}.{leaf}" in header.tensors:
                    stored = _read_rows(header, f"{path}.{leaf}")
                    kept = buffer.dtype if not buffer.is_floating_point() else dtype
                    setattr(module, leaf, stored.to(device, kept or stored.dtype, copy=True))
    model.config = replace(header.config, forms=plan)
    note_full_model(model, FullModel.read(header.folder))
    note_generation(model, header.folder)
    return model


def fill(model: Decoder, folder: str | Path, skip: Collection[str] = ()) -> None:
    """Copy a folder's weights into a model that has memory, cast to the dtypes that it has.

    The model may have adapters attached, which are left as they are, and may be sharded over ranks:
    each reads its own rows alone. Layers of another form than the file's are made of its weights,
    one at a time; of others a little of the files is in memory next to the model.

    Args:
        skip: parameters that are left as they are, whatever the file holds of them.

    Raises:
        InputError: as `read_header` and `load`.
    """
    header = read_header(folder)
    fill_from(model, header, skip)
    note_generation(model, header.folder)


def fill_from(model: nn.Module, header: ModelHeader, skip: Collection[str] = ()) -> None:
    """The same by a header that was read; parameters that are not in it are left as they are."""
    import torch

    from modicum.core.layers.form_layer import FormLayer
    from modicum.core.layers.linear_forms import (
        fit_weight,
        frozen_linears,
        own_rows,
        write_weight,
    )
    from modicum.core.ranks.sharding import own_part

    if _EMBEDDING not in skip:
        _check_tied(header)
    formed = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, FormLayer)
        and layer.trains
        and header.config.forms.of(path) == DENSE_FORM
        and not any(f"{path}.{leaf}" in skip for leaf, _ in layer.named_parameters())
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fits = name.endswith(".bias") or name.rpartition(".")[0] not in formed
            if name in header.tensors and fits and name not in skip:
                part, before = own_part(parameter)
                _read_into(header, name, part, before)
        for path, layer in frozen_linears(model).items():
            rows, before = own_rows(layer)
            if path in getattr(model, "transposed", ()):  # its rows are columns of the file's
                weight = _read_rows(header, f"{path}.weight").T[before : before + rows]
            else:
                weight = _read_rows(header, f"{path}.weight", before, rows)
            write_weight(layer, weight)
        for path, layer in formed.items():
            weight = _read_rows(header, f"{path}.weight")
            fit_weight(layer, weight.T if path in getattr(model, "transposed", ()) else weight)
        for name, buffer in model.named_buffers():
            if name in header.tensors:
                buffer.copy_(_read_rows(header, name))


def reader(folder: str | Path) -> Callable[[str], torch.Tensor]:
    """A function that reads the weight of one layer, by the layer's name, as the file stores it.

    For what begins with full-precision weights where the model holds others, as PiSSA does on a
    quantized base. Of a linear layer that is [out_features, in_features].

    Raises:
        InputError: as `read_header`; or, when it is called, the file has no such layer.
    """
    return reader_of(read_header(folder))


def reader_of(header: ModelHeader) -> Callable[[str], torch.Tensor]:
    """The same of a header that was read."""

    def read(layer: str) -> torch.Tensor:
        name = f"{layer}.weight"
        if name not in header.tensors:
            layers = [known.removesuffix(".weight") for known in header.tensors]
            raise InputError(
                "the model's file has no weight of this layer",
                file=header.folder,
                value=layer,
                candidates=layers,
            )
        return _read_rows(header, name).clone()

    return read


def _check_tied(header: ModelHeader) -> None:
    """Compare an output layer that files repeat with the embedding, some rows at a time.

    Raises:
        InputError: they differ, as where the output layer was trained alone and merged.
    """
    if header.tied is None:
        return
    for before in range(0, header.tied.shape[0], _COMPARED):
        embedding = _read_rows(header, _EMBEDDING, before, _COMPARED)
        if not (embedding == read_tensor(header.tied, before, _COMPARED)).all():
            raise InputError(
                f"by config.json it is {_EMBEDDING} too, and the weights differ; set "
                "tie_word_embeddings to false there",
                file=header.tied.file,
                field=_HEAD,
            )


def _read_rows(
    header: ModelHeader, name: str, before: int = 0, rows: int | None = None
) -> torch.Tensor:
    """A tensor of the folder, on the CPU, or `rows` of its rows after the first `before`.

    It may lie in the file's own pages: copy it, and let go of it.
    """
    entry = header.tensors[name]
    if isinstance(entry, TensorEntry):
        return read_tensor(entry, before, rows)
    return entry.read(before, rows)


def _read_into(header: ModelHeader, name: str, target: torch.Tensor, before: int) -> None:
    """Copy a tensor of the folder, or those of its rows that `target` has, a little at a time."""
    from modicum.models.tensor_pieces import read_into

    entry = header.tensors[name]
    if isinstance(entry, TensorEntry):
        read_into(entry, target, before)
    else:
        entry.read_into(target, before)
