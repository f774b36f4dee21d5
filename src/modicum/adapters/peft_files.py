"""Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters.sites import Site, all_sites, base_of
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


def save(
    attached: AttachedAdapter, folder: Path, *, base_model: str | None, write: bool = True
) -> None:
    """Write the adapter as a PEFT LoRA folder, whole or not at all; without `write`, help only.

    Raises:
        InputError: the method is no exact LoRA.
    """
    tensors: dict[str, Tensor] = {}
    scales, ranks = set(), set()
    for name, layer in attached.layers():
        lora = layer.as_lora()
        if lora is None:
            raise InputError(
                f"{attached.method.info.name} is no plain LoRA, so PEFT's LoRA format cannot hold "
                "it; merge it and save the model"
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


def load(
    model: nn.Module, folder: str | Path, *, name: str = "default", train: bool = False
) -> AttachedAdapter:
    """Attach the adapter that a PEFT LoRA folder holds.

    Raises:
        InputError: no such folder, files that cannot be read or are cut off, a kind of adapter
            that is not plain LoRA (which, and why), or one of another model.
    """
    from modicum.adapters.lora import LoRA

    folder = Path(folder)
    config = read_config(folder)
    value = LoRA.from_peft(config)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise InputError("the adapter's weights are missing", file=folder / WEIGHTS) from None
    except SafetensorError as error:
        raise InputError(f"cannot be read: {error}", file=folder / WEIGHTS) from None
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
    if not train:
        for parameter in attached.parameters():
            parameter.requires_grad_(False)
    return attached


def read_config(folder: Path) -> dict[str, Any]:
    """PEFT's configuration of a plain LoRA adapter.

    Raises:
        InputError: it is missing, no JSON, or describes another kind of adapter.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "not an adapter: no adapter_config.json in this folder", file=folder
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"not valid JSON: {error}", file=path) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
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
            own = base_of(model, site.name).get_parameter("weight")
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
