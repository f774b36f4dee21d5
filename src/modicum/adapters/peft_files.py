"""Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors`, both ways."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.adapters import peft_biases
from modicum.adapters.adapter_layer import COPY
from modicum.adapters.attachment import Attachment
from modicum.adapters.base_weights import is_exact
from modicum.adapters.convolutions import as_peft, why_not_in_peft
from modicum.adapters.dora import DoRA
from modicum.adapters.folding import Folding
from modicum.adapters.lora import LoRA
from modicum.adapters.names import plain_model, plain_name
from modicum.adapters.native_files import StoredAdapter, read_tensors
from modicum.adapters.peft_config import (
    chooses,
    leaves_out,
    of_layer,
    patterns,
    read_config,
)
from modicum.adapters.peft_copies import (
    PREFIX,
    as_kept,
    kept_in_full,
    module_names,
    saved_names,
    stored_copies,
)
from modicum.adapters.peft_slices import LoRATensors, on_layers, sites_of
from modicum.adapters.peft_task import heads, task_fields, unreadable
from modicum.adapters.rewriting import rewriting
from modicum.adapters.sites import Site, choose
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.layers.targets import ALL_LINEAR
from modicum.core.ranks.sharding import is_sharded, own_part, whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What is LoRA's file with a word switched on.
_SWITCHED: dict[str, type[LoRA]] = {DoRA.peft_switch: DoRA}
_FACTOR = re.compile(r"\.(lora_|base_layer|weight|bias).*$")


def exact_form(attached: Attachment) -> Literal["peft", "modicum"]:
    """`peft` where that format holds the adapter exactly, for the model as it was before."""
    return "peft" if why_not(attached) is None else "modicum"


def why_not(attached: Attachment) -> str | None:
    """Why PEFT's LoRA format cannot hold an adapter; None: it holds it exactly."""
    for _, layer in attached.layers():
        if (lora := layer.as_peft()) is None:
            return f"{attached.method.info.name} is no plain LoRA here"
        if not all(map(_is_finite, lora[:2])):
            return "a LoRA of it would have values that are not finite"
    if (lost := _lost(attached)) is not None:
        return f"the base of {plain_name(lost)} is quantized and was rewritten"
    if (strange := _unreadable(attached)) is not None:
        return f"{strange[1]} ({strange[0]})"
    return saved if isinstance(saved := saved_names(attached), str) else None


def save(
    attached: Attachment,
    folder: Path,
    *,
    base_model: str | None,
    rest: bool = False,
    write: bool = True,
    folding: Folding | None = None,
) -> None:
    """Write the adapter as a PEFT LoRA folder atomically; without `write`, help only.

    Args:
        rest: for the base weights as they are now, where the method has rewritten them.
        folding: the LoRA to write instead of the adapter's own.

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
    if isinstance(saved := saved_names(attached), str):
        raise InputError(f'{saved}; use form="modicum", or merge it and save the model')
    tensors: dict[str, Tensor] = {}
    loras: dict[str, LoRATensors] = {}
    alphas: dict[str, float] = {}
    ranks: dict[str, float] = {}
    switched = attached.method.peft_switch if folding is None else ""
    more = attached.method.peft_tensors if folding is None else {}
    for name, layer in attached.layers():
        lora = layer.lora_on_residual() if rest else layer.as_peft()
        if folding is not None:
            lora = (*layer.in_files(*folding.factors[name]), 1.0)
        if lora is None:
            raise InputError(
                f"{attached.method.info.name} is no plain LoRA, so PEFT's LoRA format cannot hold "
                'it; give a rank to fold it into a LoRA, use form="modicum", or merge it and save '
                "the model"
            )
        a, b, scale = lora
        loras[name] = whole(a.detach()), whole(b.detach()), scale
        for factor, own in more.items():
            tensors[f"{PREFIX}{plain_name(name)}.{own}"] = as_kept(layer.get_parameter(factor))
    sites = sites_of(attached)
    for name, (a, b, scale) in on_layers(attached, loras).items():
        a, b = as_peft(attached.model.get_submodule(name), a, b)
        a_key, b_key = _keys(sites[name])
        # Layers may share a pair, of which a file has one for each.
        tensors[a_key], tensors[b_key] = as_kept(a), as_kept(b)
        plain = plain_name(name)
        alphas[plain], ranks[plain] = scale * a.shape[0], a.shape[0]
    model = plain_model(attached.model)
    task = task_fields(model, [plain_name(name) for name in sites])
    tensors |= kept_in_full(attached, heads(model, task["task_type"]))
    biases = peft_biases.written(attached) if folding is None else {}
    tensors |= biases
    if endless := [key for key, tensor in tensors.items() if not _is_finite(tensor)]:
        problem = "its factors in PEFT's format would have values that are not finite"
        raise InputError(f'{problem}; use form="modicum"', value=endless[0].removeprefix(PREFIX))
    if not write:
        return
    rank, other_ranks = patterns(ranks)
    alpha, other_alphas = patterns(alphas)
    config = {
        "peft_type": "LORA",
        **task,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": other_ranks,
        "alpha_pattern": other_alphas,
        "lora_dropout": attached.method.dropout,
        "target_modules": target_modules(attached),
        "fan_in_fan_out": any(s.transposed for s in sites.values() if s.kind == "linear"),
        "bias": "none",
        "use_rslora": False,
        **{switch: switch == switched for switch in _SWITCHED},
        **({peft_biases.SWITCH: True} if biases else {}),
        "modules_to_save": saved or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with publish_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter that a PEFT LoRA folder holds for a model; errors are those of `files.load`."""
    file = folder / WEIGHTS
    config = read_config(folder / CONFIG)
    kind = next((_SWITCHED[key] for key in _SWITCHED if config.get(key)), LoRA)
    value = kind.from_peft(config)
    tensors = {plain_name(key): tensor for key, tensor in read_tensors(file).items()}
    tensors, biases = peft_biases.split(config, tensors)
    copies = stored_copies(model, config, tensors, file)
    tensors = {key: t for key, t in tensors.items() if key.removeprefix(PREFIX) not in copies}
    known = {
        key: (site, factor)
        for site in value.candidates(model)
        for factor, key in _named(kind, site).items()
    }
    _check_the_others(model, {key: t for key, t in tensors.items() if key not in known}, file)
    factors = {key: known[key] for key in tensors if key in known}
    if not factors:
        raise InputError("it has no factors", file=file)
    names = tuple(dict.fromkeys(site.name for site, _ in factors.values()))
    check_choice(model, config, names, folder / CONFIG)
    _check_convolutions(model, names, file)
    state = {
        f"{site.name}.{factor}": tensors[key].flatten(min(1, tensors[key].ndim - 1))
        for key, (site, factor) in factors.items()
    }
    plain = tuple(plain_name(name) for name in names)
    state = {plain_name(key): tensor for key, tensor in state.items()}
    for name, tensor in copies.items():
        path, _, leaf = name.rpartition(".")
        state[f"{path}.{COPY}{leaf}"] = tensor
    own = {name: kind.from_peft(of_layer(config, name)) for name in plain}
    prepared = {
        name: {"rank": each.rank, "alpha": each.alpha}
        for name, each in own.items()
        if (each.rank, each.alpha) != (value.rank, value.alpha)
    }
    value = value.with_fields(targets=plain, also=tuple(copies))
    stored = StoredAdapter(value, state, file, prepared=prepared)
    if config.get(peft_biases.SWITCH):
        return peft_biases.with_biases(stored, biases)
    return stored


def _is_finite(factor: Tensor) -> bool:
    """Whether all of it that is here is; of a plan's model nothing is."""
    return is_sharded(factor) or factor.is_meta or bool(factor.isfinite().all())


def _unreadable(attached: Attachment) -> tuple[str, str] | None:
    layers = sites_of(attached)
    for name in layers:
        if (why := why_not_in_peft(attached.model.get_submodule(name))) is not None:
            return plain_name(name), f"in PEFT {why}"
    return unreadable(plain_model(attached.model), [plain_name(name) for name in layers])


def _check_convolutions(model: nn.Module, names: Iterable[str], file: Path) -> None:
    """Make sure that PEFT's factors of convolutions are a change of their weights.

    Raises:
        InputError: they are not.
    """
    for name in names:
        if (why := why_not_in_peft(model.get_submodule(name))) is not None:
            raise InputError(f"PEFT has another LoRA here: {why}", file=file, value=name)


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
    modules = module_names(model)
    for key, saved in others.items():
        name = key.removeprefix(PREFIX)
        there = own.get(name.replace(".base_layer.", "."))
        if there is not None:
            part, before = own_part(there.detach())
            same = saved.shape == there.shape
            if same and not part.is_meta:
                same = torch.equal(saved[before:][: len(part)].to(part), part)
            if not same:
                problem = "a base weight was trained or resized in addition to the adapter"
                raise InputError(problem, file=file, value=name)
        elif _FACTOR.sub("", name) in modules:
            raise InputError("not a factor of plain LoRA on such a layer", file=file, value=name)
        else:
            problem = "the adapter is for another model: it has no such layer"
            raise InputError(problem, file=file, value=name)


def check_choice(
    model: nn.Module,
    config: Mapping[str, Any],
    names: Collection[str],
    file: Path,
    start: str = "init_lora_weights",
) -> None:
    """Make sure that PEFT would use the factors of just these layers.

    Args:
        start: the key that says whether factors which the file lacks change nothing.

    Raises:
        InputError: the configuration leaves one of them out, or PEFT would draw random factors.
    """
    sites = {site.name: plain_name(site.name) for site in LoRA().candidates(model)}
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
    if missing and not config.get(start, True):
        raise InputError(
            f"the factors of the layer {sites[missing[0]]} are not in {WEIGHTS}, and would be "
            "random",
            file=file,
            field=start,
            value=config.get(start),
        )


def _keys(site: Site) -> tuple[str, str]:
    name = PREFIX + plain_name(site.name)
    if site.kind == "embedding":
        return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def _named(kind: type[LoRA], site: Site) -> dict[str, str]:
    """The names in a file of a site's factors."""
    name = PREFIX + plain_name(site.name)
    more = {factor: f"{name}.{own}" for factor, own in kind.peft_tensors.items()}
    return dict(zip("AB", _keys(site), strict=True)) | more


def target_modules(attached: Attachment) -> list[str] | str:
    """Last names where PEFT takes them for just these layers, as people and servers write them.

    Else full names, and where PEFT takes those for the ends of others too, a pattern.
    """
    adapted = {plain_name(name) for name in sites_of(attached)}
    everything = module_names(attached.model)
    for names in ({name.rsplit(".", 1)[-1] for name in adapted}, adapted):
        config = {"target_modules": sorted(names)}
        if {name for name in everything if chooses(config, name)} == adapted:
            return sorted(names)
    return "|".join(re.escape(name) for name in sorted(adapted))
