"""Model folders in Hugging Face's format, written atomically: in shards, without pickles."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.files import publish_folder, write_json
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan
from modicum.models.block_checks import with_common_width
from modicum.models.config import ModelConfig
from modicum.models.generation_settings import GENERATION, generation_settings
from modicum.models.huggingface import CONFIG
from modicum.models.safetensors_file import INDEX, WEIGHTS
from modicum.models.tensor_groups import TensorGroup, dense_weight
from modicum.models.transformers.trusted import copy_code

if TYPE_CHECKING:
    import torch

    from modicum.models.llama import Llama
    from modicum.models.transformers.model import TransformersModel

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 5 * 10**9


def save(
    model: Llama | TransformersModel,
    folder: str | Path,
    *,
    files: Iterable[str | Path] = (),
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
    dense: bool = True,
    forms: FormPlan | None = None,
    dtype: torch.dtype | None = None,
    end: int | None = None,
) -> Path:
    """Write `model` to `folder` as transformers reads it atomically.

    A folder that is already there is replaced. Linear forms are written as the dense weights
    that they represent, quantized ones in the embedding's dtype; tied embeddings once. Those that
    no dense weight represents are written as they are, in a folder that modicum alone reads.

    Args:
        files: more files to stand in the folder, such as tokenizer.json.
        shard_bytes: a larger model is split into files of about this size.
        write: of a model that is sharded over ranks every rank calls this, so that its tensors can
            be gathered, one after the other, and one rank writes.
        dense: false keeps layers of a form that trains, such as low-rank factors, as they are: a
            folder as small as the model, which modicum alone reads.
        forms: the layers that are kept as they are, where it is neither all nor none.
        dtype: what the tensors are rounded to, which are all of the model's own; None: nothing is.
        end: the token that ends texts, which generation is to stop at too.

    Raises:
        InputError: the disk is full or cannot be written; a weight is beyond `dtype`.
    """
    target = Path(folder)
    raw, groups = stored(model, dense=dense, forms=forms)
    own = next(model.parameters()).dtype
    if dtype not in (None, own):
        groups = [group.rounded(dtype) for group in groups]
    if not write:
        for group in groups:
            group.make()
        return target
    with publish_folder(target) as temporary:
        _write_weights(groups, temporary, shard_bytes)
        raw.pop("dtype", None)  # transformers 5's name for what both 4 and 5 read as torch_dtype
        written = str(dtype or own).removeprefix("torch.")
        write_json(temporary / CONFIG, raw | {"torch_dtype": written})
        if getattr(model, "trained_heads", None) is None:  # it writes text
            tokens = {name: raw.get(name) for name in _TOKENS}
            write_json(temporary / GENERATION, generation_settings(model, tokens, end))
        for file in files:
            shutil.copyfile(file, temporary / Path(file).name)
        copy_code(raw, temporary)
    return target


def stored(
    model: Llama | TransformersModel, *, dense: bool = True, forms: FormPlan | None = None
) -> tuple[dict[str, Any], list[TensorGroup]]:
    """What config.json holds, and the files' tensors.

    Args:
        dense, forms: as of `save`.
    """
    from modicum.core.layers.linear_forms import forms_of, undense
    from modicum.models.llama import Llama

    if forms is None:
        forms = undense(forms_of(model)) if dense else forms_of(model)
    if not isinstance(model, Llama):
        from modicum.models.transformers.saving import groups

        formed: Any = replace(model.decoder_config, forms=forms)
        return formed.to_formed() if forms.layers else formed.to_hf(), groups(model, forms)
    planned = model.config.forms.dense().with_forms(forms.layers)
    config = with_common_width(replace(model.config, forms=planned))
    item = next(model.parameters()).dtype.itemsize
    indices = config.index_shapes()

    def group(name: str, shape: tuple[int, ...]) -> TensorGroup:
        make = lambda: {name: _tensor(model, config, name)}  # noqa: E731
        return TensorGroup({name: shape}, 4 if name in indices else item, make)

    shapes = {**config.parameter_shapes(), **indices, **config.resting_shapes()}
    return config.to_hf(), [group(*each) for each in shapes.items()]


def _write_weights(groups: Iterable[TensorGroup], folder: Path, shard_bytes: int) -> None:
    """Write the tensors in shards, one shard at a time, and the index."""
    from safetensors.torch import save_file

    shards: list[list[TensorGroup]] = [[]]
    sizes = [0]
    for group in groups:
        size = group.bytes
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(group)
        sizes[-1] += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = len(shards) > 1
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else WEIGHTS
        tensors = {name: tensor for group in shard for name, tensor in group.make().items()}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(kept, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(kept, file)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _tensor(model: Llama, config: ModelConfig, name: str) -> torch.Tensor:
    """The full parameter of this name in the file; the weight it holds, if that is to be dense."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf == "weight" and config.forms.of(path) == DENSE_FORM:
        return dense_weight(module, next(model.parameters()).dtype)
    from modicum.core.ranks.sharding import whole

    return whole(getattr(module, leaf).detach())
