"""The model of a recipe's task, as a process that traces builds it from plain values."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.base import Adapter
from modicum.adapters.preparation import Preparation
from modicum.compress.base import Compressor
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.contracts.step import autocast, losses_of_pairs
from modicum.core.layers.meta import on_meta
from modicum.core.layers.saved_tensors import Shares
from modicum.core.layers.trace import Around
from modicum.core.plain_values import as_plain, from_plain
from modicum.memory.base import ActivationPolicy
from modicum.memory.foreseen import ForeseenActivations
from modicum.models.traced_cache import TraceRequest
from modicum.models.traced_ledger import EvenRows, TracedModel
from modicum.models.transformers.trusted import trust
from modicum.recipe import Recipe
from modicum.tasks import task_of
from modicum.tasks.model_origins import model_folder

# What of a recipe a trace depends on.
_SECTIONS = ("task", "adapter", "compress", "memory", "plugins")


def trace_device(device: str) -> str:
    """Where passes of a run on `device` are traced.

    PyTorch follows no gradients on CUDA where there is none, so there a processor's operations are
    traced. Of seven recipes of Llama's shape that has 3 to 7 % more than arithmetic for CUDA.

    >>> trace_device("cpu")
    'cpu'
    """
    return device if torch.cuda.is_available() else "cpu"


def trace_request(
    recipe: Recipe,
    config: Any,
    row: ModelQuery,
    device: str,
    experts: int | None = None,
    shares: Shares | None = None,
    prepared: Mapping[str, Mapping[str, Any]] | None = None,
) -> TraceRequest:
    """What another process traces for a recipe.

    Args:
        config: of the task's model.
        row: the shape of one row, and in how many bytes it is computed.
        device: where the run is.
        experts: over how many experts of a layer rows are spread, where data decides.
        shares: what the recipe's policy on saved activations is taken to leave of them.
        prepared: by layer, what the recipe's adapter found out from data.

    Raises:
        InputError: the configuration is not made of plain values.
    """
    asked = recipe.model_dump(mode="json", include=set(_SECTIONS), exclude_unset=True)
    asked["training"] = {"seed": recipe.training.seed, "precision": recipe.training.precision}
    if recipe.model.path is not None:  # adapters go with trained models alone
        asked["model"] = {"path": recipe.model.path}
        if recipe.model.trust_remote_code:
            asked["model"]["trust_remote_code"] = True
    row = replace(row, sequences=1, micro_batches=1)
    return TraceRequest(
        f"{__name__}:traced_model",
        {
            "recipe": asked,
            "config": as_plain(config),
            "row": asdict(row),
            "device": trace_device(device),
            "experts": experts,
            "shares": None if shares is None else asdict(shares),
            "files": _digests(recipe),
            **({"prepared": prepared} if prepared else {}),
        },
    )


def traced_model(
    recipe: Mapping[str, Any],
    config: Any,
    row: Mapping[str, Any],
    device: str,
    experts: int | None,
    shares: Mapping[str, Any] | None,
    files: Mapping[str, str],
    prepared: Mapping[str, Mapping[str, Any]] | None = None,
) -> TracedModel:
    """The model of such a request, without memory, its adapter attached.

    Args:
        recipe, config, row, device, experts, shares, prepared: as `trace_request` wrote them.
        files: unread; they tell one trace from another.
    """
    asked, query = Recipe(**recipe), ModelQuery(**row)
    if asked.model.trust_remote_code:
        model_folder(asked)
    task, precision = task_of(asked), asked.training.precision
    known, half = from_plain(config), precision == "bf16"
    adapter, pairs = asked.method("adapter"), passes_of(asked) > 1
    with on_meta(torch.bfloat16 if half and adapter is not None else torch.float32):
        model = task.model(known)
        if adapter is not None:
            assert isinstance(adapter, Adapter)
            found = Preparation(prepared or {})
            adapter.attach(model, seed=asked.training.seed, prepared=found)
        elif isinstance(compressor := asked.method("compress"), Compressor):
            compressor.freeze(model)
    place = torch.device(device)

    def batch(rows: int) -> Any:
        return task.example(known, replace(query, sequences=rows))

    def loss(model: Any, batch: Any) -> Tensor:
        with autocast(place, precision):
            if not pairs:
                return task.loss_sum(model, batch)
            assert isinstance(adapter, Adapter)
            losses, between = losses_of_pairs(task, model, batch, _between(adapter))
            return losses + between

    return TracedModel(
        model,
        batch,
        loss,
        blocks=model.blocks,
        device=device,
        dtype="bfloat16" if half else "float32",
        rows=None if experts is None else EvenRows(experts),
        around=None if shares is None else _kept_by(asked, Shares(**shares)),
    )


def passes_of(recipe: Recipe) -> int:
    """How often each row of a batch runs in an update: twice where a loss compares two passes."""
    return 2 if any("pairs_passes" in part.traits for part in recipe.parts()) else 1


def _between(adapter: Adapter) -> Callable[[Any, Any, Any], Tensor]:
    return lambda first, second, batch: adapter.between(first, second, batch.labels)


def _kept_by(recipe: Recipe, shares: Shares) -> Around:
    """The recipe's policy on saved activations, as it is in a trace."""
    policy = recipe.method("memory")
    assert isinstance(policy, ActivationPolicy)
    return lambda model, works_in: ForeseenActivations(policy, model, shares, works_in).context()


def _digests(recipe: Recipe) -> dict[str, str]:
    """Digests of the files that task, adapter, policy and a trusted model are written in."""
    found = {}
    if recipe.model.trust_remote_code:
        found["the model's folder"] = trust(model_folder(recipe)).digest()
    for value in (task_of(recipe), recipe.method("adapter"), recipe.method("memory")):
        with suppress(TypeError, OSError):
            file = Path(inspect.getfile(type(value)))
            found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found
