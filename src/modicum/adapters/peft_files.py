"""Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.adapters.own_files import read_json, read_tensors
from modicum.adapters.rewriting import RewritingLayer, rewriting
from modicum.adapters.sites import Site, all_sites
from modicum.adapters.weights import is_exact
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.sharding import whole

if TYPE_CHECKING:
    from modicum.adapters.attached import AttachedAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED = {
    "use_dora": "DoRA scales rows of the weight, which LoRA does not",
    "rank_pattern": "layers have different ranks",
    "alpha_pattern": "layers have different scales",
    "modules_to_save": "whole layers were trained beside the adapter",
    "layer_replication": "layers of the base are repeated",
    "lora_bias": "the adapter has biases",
    "target_parameters": "parameters that are no layers are adapted",
}


def exact_form(attached: AttachedAdapter) -> Literal["peft", "modicum"]:
    """`peft` where that format holds the adapter exactly, for the model as it was before."""
    _, first = next(attached.layers())
    return "peft" if first.as_lora() is not None and _lost(attached) is None else "modicum"


def save(
    attached: AttachedAdapter,
    folder: Path,
    *,
    base_model: str | None,
    rest: bool = False,
    write: bool = True,
) -> None:
    """Write the adapter as a PEFT LoRA folder, whole or not at all; without `write`, help only.

    Args:
        rest: for the base weights as they are now, where the method has rewritten them.

    Raises:
        InputError: the method is no exact LoRA, or its base has lost the weights that one is for.
    """
    lost = None if rest else _lost(attached)
    if lost is not None:
        raise InputError(
            "its base is quantized and was rewritten, so no LoRA for the original model is exact; "
            'use form="modicum", which keeps the base, or form="peft-rest" and save the base too, '
            "or merge(dense=torch.bfloat16) and save the model",
            value=lost,
        )
    tensors: dict[str, Tensor] = {}
    scales, ranks = set(), set()
    for name, layer in attached.layers():
        lora = layer.as_lora()
        if rest and isinstance(layer, RewritingLayer):
            lora = layer.beside_the_rest()
        if lora is None:
            raise InputError(
                f"{attached.method.info.name} is no plain LoRA, so PEFT's LoRA format cannot hold "
                'it; use form="modicum", or merge it and save the model'
            )
        a, b, scale = lora
        a_key, b_key = _keys(attached.sites[name])
        tensors[a_key] = whole(a.detach()).contiguous().cpu()
        tensors[b_key] = whole(b.detach()).contiguous().cpu()
        scales.add(scale)
        ranks.add(a.shape[0])
    if not write:
        return
    if len(scales) > 1 or len(ranks) > 1:
        raise InputError("layers have different ranks or scales; merge it and save the model")
    rank, scale = ranks.pop(), scales.pop()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": attached.method.dropout,
        "target_modules": _target_modules(attached),
        "fan_in_fan_out": any(s.transposed for s in attached.sites.values() if s.kind == "linear"),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with publish_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def load(model: nn.Module, folder: Path, *, name: str) -> AttachedAdapter:
    """Attach the adapter that a PEFT LoRA folder holds; errors are those of `files.load`."""
    from modicum.adapters.lora import LoRA

    config = read_config(folder)
    value = LoRA.from_peft(config)
    tensors = read_tensors(folder / WEIGHTS)
    tensors = _without_base_copies(model, tensors, folder / WEIGHTS)
    known = {key: site for site in all_sites(model) for key in _keys(site)}
    strange = sorted(tensors.keys() - known.keys())
    if strange:
        raise InputError(
            "the adapter is for another model: it has no such layer",
            file=folder / WEIGHTS,
            value=strange[0].removeprefix(_PREFIX),
        )
    names = tuple(dict.fromkeys(known[key].name for key in tensors))
    attached = value.with_fields(targets=names).attach(model, name=name)
    state = {
        f"{site.name}.{factor}": tensors[key]
        for site in attached.sites.values()
        for factor, key in zip("AB", _keys(site), strict=True)
        if key in tensors
    }
    try:
        attached.load_state_dict(state)
    except InputError as error:
        attached.detach()
        raise InputError(f"does not fit the model: {error}", file=folder / WEIGHTS) from None
    return attached


def _lost(attached: AttachedAdapter) -> str | None:
    """A layer whose original weight is not there any more: rewritten, then quantized."""
    rewritten = (name for name, layer in rewriting(attached).items() if layer.rewrote)
    return next((n for n in rewritten if not is_exact(attached.model.get_submodule(n))), None)


def read_config(folder: Path) -> dict[str, Any]:
    """PEFT's configuration of a plain LoRA adapter.

    Raises:
        InputError: it is no JSON, or describes another kind of adapter.
    """
    path = folder / CONFIG
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError("not a LoRA adapter", file=path, field="peft_type", value=kind)
    for key, why in _REFUSED.items():
        if config.get(key):
            raise InputError(f"not plain LoRA: {why}", file=path, field=key, value=config[key])
    if config.get("bias", "none") != "none":
        problem = "biases were trained beside the adapter"
        raise InputError(problem, file=path, field="bias", value=config["bias"])
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise InputError("must be above zero", file=path, field=key, value=config.get(key))
    return config


def _without_base_copies(
    model: nn.Module, tensors: dict[str, Tensor], file: Path
) -> dict[str, Tensor]:
    """The factors alone: with an adapter on embeddings PEFT saves the embeddings themselves too.

    Raises:
        InputError: such a weight is not the model's, so more than the adapter was trained.
    """
    kept = dict(tensors)
    for site in all_sites(model):
        for part in ("base_layer.weight", "weight"):
            saved = kept.pop(f"{_PREFIX}{site.name}.{part}", None)
            if saved is None:
                continue
            own = model.get_submodule(site.name).get_parameter("weight")
            if saved.shape != own.shape or not torch.equal(saved.to(own), own):
                raise InputError(
                    "a base weight was trained or resized beside the adapter",
                    file=file,
                    value=site.name,
                )
    return kept


def _keys(site: Site) -> tuple[str, str]:
    if site.kind == "embedding":
        return f"{_PREFIX}{site.name}.lora_embedding_A", f"{_PREFIX}{site.name}.lora_embedding_B"
    return f"{_PREFIX}{site.name}.lora_A.weight", f"{_PREFIX}{site.name}.lora_B.weight"


def _target_modules(attached: AttachedAdapter) -> list[str]:
    """Last names where they choose just these layers, as people and servers write them."""
    suffixes = {site.suffix for site in attached.sites.values()}
    chosen = {site.name for site in all_sites(attached.model) if site.suffix in suffixes}
    return sorted(suffixes if chosen == attached.sites.keys() else attached.sites)
