"""A LoRA as a GGUF file of its own, which llama.cpp attaches to the file of the base model."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from modicum.adapters import AttachedAdapter
from modicum.adapters.copies import parameter_names
from modicum.adapters.names import plain_name
from modicum.adapters.peft_files import exact_form
from modicum.core.errors import InputError
from modicum.models.decoders import Decoder
from modicum.models.gguf.architectures import TensorNames, full_config
from modicum.models.gguf.writing import DataType, GgufTensor, opened, planned
from modicum.models.saving import stored


def write_adapter(
    model: Decoder, adapter: AttachedAdapter, file: str | Path, *, dtype: DataType = "f32"
) -> Path:
    """Write a LoRA that is attached to `model` as a GGUF file, for the GGUF of its base model.

    Raises:
        InputError: it is no exact LoRA of linear layers, it trains parameters in full (`also`), or
            what `write_model` refuses.
    """
    if trained := parameter_names(adapter.copied):
        raise InputError(
            f"this adapter trains {trained[0]} in full (`also`), and llama.cpp attaches LoRA "
            "factors alone; write the merged model (`--form gguf`)",
            field="--form",
            value="gguf-adapter",
        )
    if exact_form(adapter) != "peft":
        raise InputError(
            f"{adapter.method.info.name} is no plain LoRA of the base model here, and llama.cpp "
            "attaches nothing else; write the merged model (`--form gguf`)",
            field="--form",
            value="gguf-adapter",
        )
    if adapter.for_full_model() is not None:
        raise InputError(
            "this adapter is for the full model, and here it is on one that lost units; save it, "
            "and write it from the full model with that loaded",
            field="--form",
            value="gguf-adapter",
        )
    raw, groups = stored(model)
    names = TensorNames(full_config(model, raw))
    known = {each for group in groups for each in group.shapes}
    found: list[tuple[GgufTensor, Tensor]] = []
    strength: float | None = None
    for layer_name, layer in adapter.layers():
        name = f"{plain_name(layer_name)}.weight"
        lora = layer.as_lora()
        if lora is None or adapter.sites[layer_name].kind != "linear" or name not in known:
            problem = "llama.cpp has no place for an adapter of this layer; write the merged model"
            raise InputError(problem, field=plain_name(layer_name))
        a, b, scale = lora
        # One number in the file goes for all layers, divided by each one's rank.
        strength = scale * a.shape[0] if strength is None else strength
        b = names.change(name)(b.detach() * (scale * a.shape[0] / strength))
        for leaf, factor in (("lora_a", a.detach()), ("lora_b", b)):
            made = planned(f"{names.of(name)}.{leaf}", tuple(factor.shape), dtype)
            found.append((made, factor))
    with opened(Path(file), names.architecture.name, [made for made, _ in found]) as (writer, add):
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", strength or 0.0)
        for _, factor in found:
            add(factor)
    return Path(file)
