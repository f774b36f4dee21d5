"""Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`, both ways."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.base_weights import is_exact
from modicum.adapters.lora import LoRA
from modicum.adapters.names import plain_model, plain_name
from modicum.adapters.native_files import StoredAdapter, read_tensors
from modicum.adapters.peft_config import chooses, leaves_out, read_config
from modicum.adapters.peft_task import (
    classifier_heads,
    heads,
    task_fields,
    trained_heads,
    unreadable,
)
from modicum.adapters.rewriting import rewriting
from modicum.adapters.sites import Site, all_sites, choose
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.layers.targets import ALL_LINEAR
from modicum.core.ranks.sharding import whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"\.(lora_|base_layer|weight|bias).*$")


def exact_form(attached: Attachment) -> Literal["peft", "modicum"]:
    """`peft` where that format holds the adapter exactly, for the model as it was before."""
    _, first = next(attached.layers())
    exact = first.as_lora() is not None and _lost(attached) is None
    return "peft" if exact and _unreadable(attached) is None else "modicum"


def save(
    attached: Attachment,
    folder: Path,
    *,
    base_model: str | None,
    rest: bool = False,
    write: bool = True,
) -> None:
    """Write the adapter as a PEFT LoRA folder atomically; without `write`, help only.

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
    if (strange := _unreadable(attached)) is not None:
        layer_name, why = strange
        raise InputError(
            f'{why}, so it would load another adapter; use form="modicum", or merge it and save '
            "the model",
            value=layer_name,
        )
    tensors: dict[str, Tensor] = {}
    scales, ranks = set(), set()
    for name, layer in attached.layers():
        lora = layer.lora_on_residual() if rest else layer.as_lora()
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
    model = plain_model(attached.model)
    task = task_fields(model, [plain_name(name) for name in attached.sites])
    for name, head in (heads(model, task["task_type"]) | trained_heads(model)).items():
        for key, value in head.state_dict().items():
            kept = whole(value.detach()).clone().contiguous().cpu()
            tensors[f"{_PREFIX}{name}.{plain_name(key)}"] = kept
    if not write:
        return
    if len(scales) > 1 or len(ranks) > 1:
        raise InputError("layers have different ranks or scales; merge it and save the model")
    rank, scale = ranks.pop(), scales.pop()
    trained = sorted({name.rpartition(".")[2] for name in trained_heads(model)})
    config = {
        "peft_type": "LORA",
        **task,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": attached.method.dropout,
        "target_modules": _target_modules(attached),
        "fan_in_fan_out": any(s.transposed for s in attached.sites.values() if s.kind == "linear"),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": trained or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with publish_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter that a PEFT LoRA folder holds for a model; errors are those of `files.load`."""
    file = folder / WEIGHTS
    could = trained_heads(model) or classifier_heads(model)
    config = read_config(folder / CONFIG, {name.rpartition(".")[2] for name in could})
    saved = config.get("modules_to_save") or ()
    # Of a model of ours all are trained.
    trained = trained_heads(model) or {n: h for n, h in could.items() if n.split(".")[-1] in saved}
    value = LoRA.from_peft(config)
    tensors = {plain_name(key): tensor for key, tensor in read_tensors(file).items()}
    kept = _kept(tensors, trained)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in kept}
    known = {key: (site, "AB"[i]) for site in all_sites(model) for i, key in enumerate(_keys(site))}
    _check_the_others(model, {key: t for key, t in tensors.items() if key not in known}, file)
    factors = {key: known[key] for key in tensors if key in known}
    if not factors:
        raise InputError("it has no factors", file=file)
    names = tuple(dict.fromkeys(site.name for site, _ in factors.values()))
    _check_the_choice(model, config, names, folder / CONFIG)
    state = {f"{site.name}.{factor}": tensors[key] for key, (site, factor) in factors.items()}
    plain = tuple(plain_name(name) for name in names)
    state = {plain_name(key): tensor for key, tensor in state.items()}
    found = {key.removeprefix(_PREFIX): tensor for key, tensor in kept.items()}
    return StoredAdapter(value.with_fields(targets=plain), state, file, heads=found)


def _kept(tensors: Mapping[str, Tensor], trained: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of heads that were trained in full."""
    begins = tuple(f"{_PREFIX}{name}." for name in trained)
    return {key: tensor for key, tensor in tensors.items() if key.startswith(begins)}


def _unreadable(attached: Attachment) -> tuple[str, str] | None:
    return unreadable(plain_model(attached.model), [plain_name(name) for name in attached.sites])


def _lost(attached: Attachment) -> str | None:
    """A layer whose original weight is not there any more: rewritten, then quantized."""
    rewritten = (name for name, layer in rewriting(attached).items() if layer.rewrote)
    return next((n for n in rewritten if not is_exact(attached.model.get_submodule(n))), None)


def _check_the_others(model: nn.Module, others: dict[str, Tensor], file: Path) -> None:
    """Make sure that tensors which are no factors say nothing that the model does not.

    With an adapter on embeddings PEFT saves the embeddings themselves too.

    Raises:
        InputError: one is of a layer that the model does not have, is a base weight that is not
            the model's, or is something that plain LoRA does not have.
    """
    own = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    modules = _modules(model)
    for key, saved in others.items():
        name = key.removeprefix(_PREFIX)
        there = own.get(name.replace(".base_layer.", "."))
        if there is not None:
            same = there.is_meta or torch.equal(saved.to(there), there)
            if saved.shape != there.shape or not same:
                problem = "a base weight was trained or resized in addition to the adapter"
                raise InputError(problem, file=file, value=name)
        elif _FACTOR.sub("", name) in modules:
            raise InputError("not a factor of plain LoRA on such a layer", file=file, value=name)
        else:
            problem = "the adapter is for another model: it has no such layer"
            raise InputError(problem, file=file, value=name)


def _check_the_choice(
    model: nn.Module, config: Mapping[str, Any], names: Collection[str], file: Path
) -> None:
    """Make sure that PEFT would use the factors of just these layers.

    Raises:
        InputError: the configuration leaves one of them out, or PEFT would draw random factors.
    """
    sites = {site.name: plain_name(site.name) for site in all_sites(model)}
    targets, among = config.get("target_modules"), set(sites)
    if targets is None:
        among, targets = set(names), ".*"
    elif isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        among, targets = {site.name for site in choose(model, [ALL_LINEAR])}, ".*"
    meant = {**config, "target_modules": targets}
    for name in names:
        key = leaves_out(meant, sites[name]) or (None if name in among else "target_modules")
        if key is not None:
            problem = f"leaves out the layer {sites[name]}, of which {WEIGHTS} has factors"
            raise InputError(problem, file=file, field=key, value=config.get(key))
    missing = sorted(n for n in among.difference(names) if chooses(meant, sites[n]))
    if missing and config.get("init_lora_weights", True) in (None, False):
        raise InputError(
            f"the factors of the layer {sites[missing[0]]} are not in {WEIGHTS}, and would be "
            "random",
            file=file,
            field="init_lora_weights",
            value=config.get("init_lora_weights"),
        )


def _keys(site: Site) -> tuple[str, str]:
    name = _PREFIX + plain_name(site.name)
    if site.kind == "embedding":
        return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def _target_modules(attached: Attachment) -> list[str] | str:
    """Last names where PEFT takes them for just these layers, as people and servers write them.

    Else full names, and where PEFT takes those for the ends of others too, a pattern.
    """
    adapted = {plain_name(site.name) for site in attached.sites.values()}
    everything = _modules(attached.model)
    for names in ({name.rsplit(".", 1)[-1] for name in adapted}, adapted):
        config = {"target_modules": sorted(names)}
        if {name for name in everything if chooses(config, name)} == adapted:
            return sorted(names)
    return "|".join(re.escape(name) for name in sorted(adapted))


def _modules(model: nn.Module) -> set[str]:
    """Plain names of all modules but those inside of adapters."""
    return {
        plain_name(name)
        for name, _ in model.named_modules()
        if ".layers_by_adapter" not in f".{name}"
    }
