"""RandLoRA as PEFT keeps it: `peft_type: RANDLORA`, both ways.

PEFT draws its bases in half precision, of a kind that depends on the machine, so they are taken
from the file. B's columns meet A's rows in another order there than in the paper
(`pairing="rank"`), and s = alpha / r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.names import plain_model, plain_name
from modicum.adapters.native_files import StoredAdapter, read_json, read_tensors
from modicum.adapters.peft_config import HARMLESS, check_names, is_number
from modicum.adapters.peft_copies import PREFIX
from modicum.adapters.peft_files import CONFIG, WEIGHTS, check_choice, target_modules
from modicum.adapters.peft_task import task_fields, unreadable
from modicum.adapters.randlora import GAMMA, LAMBDA, RandLoRA
from modicum.adapters.sites import Site, all_sites
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.ranks.sharding import whole

PEFT_TYPE = "RANDLORA"
_BASES = {"A": "base_model.randlora_A", "B": "base_model.randlora_B"}
_ENDS = {LAMBDA: ".randlora_lambda", GAMMA: ".randlora_gamma"}
_READ = (
    *("peft_type", "r", "randlora_alpha", "randlora_dropout", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
)
_OF_THE_START = ("projection_prng_key", "save_projection", "sparse", "very_sparse", "init_weights")


def save(attached: Attachment, folder: Path, *, base_model: str | None, write: bool = True) -> None:
    """Write the adapter as a PEFT RandLoRA folder atomically; without `write`, help only.

    Raises:
        InputError: it pairs columns as the paper has it, which PEFT cannot; or PEFT could not read
            it on this model.
    """
    value, sites = attached.method, list(attached.sites.values())
    assert isinstance(value, RandLoRA)
    if (why := why_not(attached)) is not None:
        raise InputError(f'{why}; use form="modicum", or merge it and save the model')
    tensors = _bases(attached, sites)
    for name, layer in attached.layers():
        root = math.sqrt(len(layer.get_parameter(LAMBDA))) if value.scaling == "sqrt" else 1.0
        key = PREFIX + plain_name(name)
        scales = whole(layer.get_parameter(LAMBDA).detach()) / root
        tensors[key + _ENDS[LAMBDA]] = scales.T.contiguous().cpu()
        tensors[key + _ENDS[GAMMA]] = whole(layer.get_parameter(GAMMA).detach()).clone().cpu()
    if not write:
        return
    config = {
        "peft_type": PEFT_TYPE,
        **task_fields(plain_model(attached.model), [plain_name(site.name) for site in sites]),
        "base_model_name_or_path": base_model,
        "r": value.rank,
        "randlora_alpha": 2.0 * value.rank if value.alpha is None else value.alpha,
        "randlora_dropout": value.dropout,
        "target_modules": target_modules(attached),
        "fan_in_fan_out": any(site.transposed for site in sites),
        "bias": "none",
        "modules_to_save": None,
        "projection_prng_key": 0,
        "save_projection": True,
        "inference_mode": True,
    }
    with publish_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def why_not(attached: Attachment) -> str | None:
    """Why PEFT's format cannot hold an adapter; None: it holds it exactly."""
    value = attached.method
    if not isinstance(value, RandLoRA):
        return f"{value.info.name} is no RandLoRA"
    if value.pairing != "rank":
        return 'PEFT pairs the columns of RandLoRA\'s bases as pairing="rank" does, this one not'
    if attached.copied:
        return "copies of base parameters are trained in addition"
    names = [plain_name(name) for name in attached.sites]
    strange = unreadable(plain_model(attached.model), names)
    return None if strange is None else f"{strange[1]} ({strange[0]})"


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter of a PEFT RandLoRA folder, for a model; errors are those of `files.load`."""
    config, file = read_json(folder / CONFIG), folder / WEIGHTS
    try:
        _check(config)
    except InputError as error:
        raise error.located(file=folder / CONFIG) from None
    tensors = {plain_name(key): tensor for key, tensor in read_tensors(file).items()}
    sites = {PREFIX + plain_name(site.name): site for site in all_sites(model)}
    state, chosen = {}, dict[str, Site]()
    for key, tensor in tensors.items():
        owner, _, leaf = key.rpartition(".")
        factor = next((name for name, end in _ENDS.items() if end == f".{leaf}"), None)
        if key in _BASES.values() or leaf in ("randlora_A", "randlora_B"):
            continue
        if factor is None or owner not in sites:
            problem = "the adapter is for another model, or this is no tensor of RandLoRA's"
            raise InputError(problem, file=file, value=key.removeprefix(PREFIX))
        if tensor.ndim != 2:
            raise InputError("is no matrix", file=file, value=key.removeprefix(PREFIX))
        site = sites[owner]
        chosen[site.name] = site
        state[f"{plain_name(site.name)}.{factor}"] = tensor.T if factor == LAMBDA else tensor
    if not chosen:
        raise InputError("it has no factors", file=file)
    missing = next((key for key in _BASES.values() if key not in tensors), None)
    if missing is not None:
        raise InputError(
            "the bases are not in the file, and PEFT draws them otherwise on other machines; save "
            "the adapter again with save_projection=True",
            file=file,
            value=missing,
        )
    bases = [tensors[key] for key in _BASES.values()]
    if any(base.ndim != 3 or not base.is_floating_point() for base in bases):
        raise InputError("the bases are no numbers in three dimensions", file=file)
    check_choice(model, {**config, "init_lora_weights": True}, tuple(chosen), folder / CONFIG)
    value = RandLoRA(
        rank=int(config["r"]),
        alpha=float(config["randlora_alpha"]),
        scaling="rank",
        gamma_start="short",
        pairing="rank",
        bases="stored",
        dropout=float(config.get("randlora_dropout", 0.0)),
        targets=tuple(plain_name(name) for name in chosen),
    )
    needed = value.shared_frozen(list(chosen.values()))
    found = {
        "A": tensors[_BASES["A"]].flatten(end_dim=-2),
        "B": tensors[_BASES["B"]].flatten(start_dim=1).T,
    }
    for name, base in found.items():
        rows, columns = needed[name].shape
        if base.shape[0] < rows or base.shape[1] < columns:
            problem = f"has bases of shape {tuple(base.shape)}, the layers need {(rows, columns)}"
            raise InputError(problem, file=file, field=_BASES[name])
        state[f"shared.{name}"] = base[:rows, :columns].float().contiguous()
    return StoredAdapter(value, state, file)


def _bases(attached: Attachment, sites: list[Site]) -> dict[str, Tensor]:
    """A [r, 1, d] and B [D, N, r] as PEFT makes room for them: of the largest in and out sizes."""
    rank = attached.method.model_dump()["rank"]
    outs, ins = (max(getattr(s, f"{side}_features") for s in sites) for side in ("out", "in"))
    short, long = sorted((outs, ins))
    count = -(-short // rank)
    a, b = (attached.shared.get_buffer(name).float().cpu() for name in "AB")
    room_a, room_b = torch.zeros(rank, short), torch.zeros(count * rank, long)
    room_a[:, : a.shape[1]] = a
    room_b[: b.shape[0], : b.shape[1]] = b
    return {
        _BASES["A"]: room_a.view(rank, 1, short),
        _BASES["B"]: room_b.T.reshape(long, count, rank).contiguous(),
    }


def _check(config: Mapping[str, Any]) -> None:
    """Make sure that a configuration says nothing but what is read.

    Raises:
        InputError: it does.
    """
    for key, value in config.items():
        off = value is None or value is False or value in ("", [], {})
        if key in _READ or key in _OF_THE_START or key in HARMLESS or off:
            continue
        if key == "bias" and value == "none":
            continue
        problem = "trains more than RandLoRA does, or is not known"
        raise InputError(problem, field=key, value=value)
    rank, alpha = config.get("r"), config.get("randlora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise InputError("must be an integer above zero", field="r", value=rank)
    if not (is_number(alpha) and alpha > 0):
        raise InputError("must be a number above zero", field="randlora_alpha", value=alpha)
    dropout = config.get("randlora_dropout", 0.0)
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise InputError("must be from 0 to below 1", field="randlora_dropout", value=dropout)
    check_names(config)
