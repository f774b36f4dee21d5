"""Model folders in Hugging Face's format, written atomically: in shards, without pickles."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.files import publish_folder, write_json
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan
from modicum.models.config import ModelConfig
from modicum.models.huggingface import CONFIG, INDEX, WEIGHTS

if TYPE_CHECKING:
    import torch

    from modicum.models.llama import Llama

SHARD_BYTES = 5 * 10**9


def save(
    model: Llama,
    folder: str | Path,
    *,
    files: Iterable[str | Path] = (),
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
    dense: bool = True,
) -> Path:
    """Write `model` to `folder` as transformers reads it atomically.

    A folder that is already there is replaced. Linear forms are written as the dense weights
    that they represent, quantized ones in the embedding's dtype; tied embeddings once.

    Args:
        files: more files to stand in the folder, such as tokenizer.json.
        shard_bytes: a larger model is split into files of about this size.
        write: of a model that is sharded over ranks every rank calls this, so that its tensors can
            be gathered, one after the other, and one rank writes.
        dense: false keeps layers of a form that trains, such as low-rank factors, as they are: a
            folder as small as the model, which modicum alone reads.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    from modicum.core.layers.linear_forms import forms_of

    target = Path(folder)
    found = FormPlan() if dense else forms_of(model)
    config = replace(model.config, forms=model.config.forms.dense().with_forms(found.layers))
    if not write:
        for name in config.parameter_shapes():
            _tensor(model, config, name)
        return target
    with publish_folder(target) as temporary:
        dtype = _write_weights(model, config, temporary, shard_bytes)
        raw = config.to_hf()
        raw.pop("dtype", None)  # transformers 5's name for what both 4 and 5 read as torch_dtype
        write_json(temporary / CONFIG, raw | {"torch_dtype": dtype})
        tokens = {name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        generation = {name: token for name, token in tokens.items() if token is not None}
        write_json(temporary / "generation_config.json", {"_from_model_config": True} | generation)
        for file in files:
            shutil.copyfile(file, temporary / Path(file).name)
    return target


def _write_weights(model: Llama, config: ModelConfig, folder: Path, shard_bytes: int) -> str:
    """Write the tensors in shards, one at a time, and the index; the name of their dtype."""
    from safetensors.torch import save_file

    dtype = next(model.parameters()).dtype
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, shape in config.parameter_shapes().items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = len(shards) > 1
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else WEIGHTS
        tensors = {name: _tensor(model, config, name).contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    return str(dtype).removeprefix("torch.")


def _tensor(model: Llama, config: ModelConfig, name: str) -> torch.Tensor:
    """The full parameter of this name in the file; the weight it holds, if that is to be dense."""
    from modicum.core.layers.linear_forms import form_of
    from modicum.core.ranks.sharding import whole

    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    dense = leaf == "weight" and config.forms.of(path) == DENSE_FORM
    form = form_of(module) if dense else None
    if form is None:
        return whole(module.get_parameter(leaf).detach())
    weight = whole(form.to_dense(module).detach())
    return weight if form.trains else weight.to(next(model.parameters()).dtype)
