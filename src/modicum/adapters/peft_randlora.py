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
from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.names import plain_name
from modicum.adapters.native_files import StoredAdapter
from modicum.adapters.peft_config import is_number
from modicum.adapters.peft_copies import PREFIX
from modicum.adapters.peft_files import CONFIG, WEIGHTS, check_choice
from modicum.adapters.peft_folders import (
    check_config,
    of_layers,
    read_folder,
    why_not_whole,
    write_folder,
)
from modicum.adapters.randlora import GAMMA, LAMBDA, RandLoRA
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import whole

PEFT_TYPE = "RANDLORA"
_BASES = {"A": "base_model.randlora_A", "B": "base_model.randlora_B"}
_ENDS = {LAMBDA: "randlora_lambda", GAMMA: "randlora_gamma"}
_READ = (
    *("randlora_alpha", "randlora_dropout", "init_weights", "projection_prng_key"),
    *("save_projection", "sparse", "very_sparse"),
)


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
        tensors[f"{key}.{_ENDS[LAMBDA]}"] = scales.T.contiguous().cpu()
        tensors[f"{key}.{_ENDS[GAMMA]}"] = whole(layer.get_parameter(GAMMA).detach()).clone().cpu()
    if write:
        kind = {
            "peft_type": PEFT_TYPE,
            "r": value.rank,
            "randlora_alpha": 2.0 * value.rank if value.alpha is None else value.alpha,
            "randlora_dropout": value.dropout,
            "bias": "none",
            "projection_prng_key": 0,
            "save_projection": True,
        }
        write_folder(attached, folder, tensors, base_model=base_model, **kind)


def why_not(attached: Attachment) -> str | None:
    """Why PEFT's format cannot hold an adapter; None: it holds it exactly."""
    value = attached.method
    if not isinstance(value, RandLoRA):
        return f"{value.info.name} is no RandLoRA"
    if value.pairing != "rank":
        return 'PEFT pairs the columns of RandLoRA\'s bases as pairing="rank" does, this one not'
    return why_not_whole(attached)


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter of a PEFT RandLoRA folder, for a model; errors are those of `files.load`."""
    config, tensors = read_folder(folder, _check)
    file = folder / WEIGHTS
    shared = {key for key in tensors if key.endswith((".randlora_A", ".randlora_B"))}
    own = {key: tensor for key, tensor in tensors.items() if key not in shared}
    state, chosen = {}, dict[str, Site]()
    for site, found in of_layers(model, own, _ENDS, folder).values():
        chosen[site.name] = site
        for factor, tensor in found.items():
            if tensor.ndim != 2:
                name = f"{plain_name(site.name)}.{_ENDS[factor]}"
                raise InputError("is no matrix", file=file, value=name)
            state[f"{plain_name(site.name)}.{factor}"] = tensor.T if factor == LAMBDA else tensor
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
    check_choice(model, config, tuple(chosen), folder / CONFIG, start="init_weights")
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
    bases_here = {
        "A": tensors[_BASES["A"]].flatten(end_dim=-2),
        "B": tensors[_BASES["B"]].flatten(start_dim=1).T,
    }
    for name, base in bases_here.items():
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
    check_config(config, name="RandLoRA", read=_READ)
    alpha = config.get("randlora_alpha")
    if not (is_number(alpha) and alpha > 0):
        raise InputError("must be a number above zero", field="randlora_alpha", value=alpha)
    dropout = config.get("randlora_dropout", 0.0)
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise InputError("must be from 0 to below 1", field="randlora_dropout", value=dropout)
