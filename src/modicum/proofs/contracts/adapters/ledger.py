"""What an adapter spends against what its ledger says, as differences from a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import AdapterQuery
from modicum.core.contracts.ledger import Ledger
from modicum.core.machine.memory import tensor_bytes
from modicum.models import create
from modicum.models.ledger import AdapterActivations
from modicum.models.ledger import ledger as model_ledger
from modicum.models.llama import Llama
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    attached,
    dropped,
    llama,
    tokens,
)
from modicum.proofs.contracts.traced_change import DEEP, SHAPE, needs_gradient


@adapters_check()
def check_parameters_and_bytes(subject: AdapterSubject) -> None:
    """The ledger's trained parameters and persistent bytes are those of the layers, exactly."""
    adapter = attached(subject, llama())
    value = adapter.method
    sites = list(adapter.sites.values())
    predicted = sum(value.trained(site) for site in sites) + value.trained_shared(sites)
    real = sum(parameter.numel() for parameter in adapter.parameters())
    assert predicted == real, f"trained() says {predicted} parameters, there are {real}"
    kept = [
        tensor
        for module in (adapter.shared, *(layer for _, layer in adapter.layers()))
        for tensor in (*module.parameters(), *module.buffers())
    ]
    said, found = adapter_ledger(adapter).bytes("weight"), tensor_bytes(kept)
    assert said == found, f"the ledger says {said} bytes of weights, there are {found}"


@adapters_check()
def check_work(subject: AdapterSubject) -> None:
    """The ledger's matrix-product work beyond the frozen model's is what PyTorch counts."""
    base = _flops(llama(), frozen=True)
    model = llama()
    adapter = attached(subject, model)
    adapted, said = _flops(model), adapter_ledger(adapter)
    for phase, counted, before in zip(("forward", "backward"), adapted, base, strict=True):
        extra, predicted = counted - before, said.flops(phase)
        assert extra == predicted, (
            f"the ledger says {predicted} operations more in the {phase} pass, PyTorch counts "
            f"{extra}"
        )


@adapters_check()
def check_activations(subject: AdapterSubject) -> None:
    """Saved activations differ from full training's as the ledgers say, to 5 % of the latter's."""
    for dropout in sorted({0.0, dropped(subject, 0.3)}):
        model = create(DEEP, seed=0)
        full = _saved(model)
        adapter = attached(subject, model, dropout=dropout)
        predicted = saved_said(adapter) - saved_said(None)
        measured = _saved(model) - full
        assert abs(measured - predicted) <= 0.05 * full, (
            f"with dropout {dropout} the ledger says {predicted:+} bytes against full training's "
            f"{full}, autograd saves {measured:+}"
        )


def adapter_ledger(adapter: AttachedAdapter) -> Ledger:
    """What an adapter says that it spends, all its sites together."""
    method, sites = adapter.method, list(adapter.sites.values())
    each = [method.ledger(AdapterQuery(site, SHAPE)) for site in sites]
    return Ledger.sum([*each, method.shared_ledger(sites)])


def _flops(model: Llama, *, frozen: bool = False) -> tuple[int, int]:
    """Operations of matrix products forward and backward, down to the embeddings' output.

    That output takes a gradient, so that the first block's layers work as all others do.
    """
    if frozen:
        model.requires_grad_(False)
    hook = model.model.embed_tokens.register_forward_hook(needs_gradient)
    counted = []
    with sdpa_kernel(SDPBackend.MATH):
        # The counter knows `addmm` and not its in-place form, which does the same work.
        in_place = {torch.ops.aten.addmm_: _product_in_place}
        with FlopCounterMode(display=False, custom_mapping=in_place) as forward:
            loss = model(tokens(SHAPE.sequences, SHAPE.tokens)).sum()
        counted.append(forward.get_total_flops())
        with FlopCounterMode(display=False, custom_mapping=in_place) as backward:
            loss.backward()
        counted.append(backward.get_total_flops())
    hook.remove()
    return counted[0], counted[1]


def _product_in_place(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _saved(model: Llama) -> int:
    """Bytes that autograd keeps for the backward pass, without what is there anyway, by storage."""
    with saved_bytes((*model.parameters(), *model.buffers())) as saved:
        model(tokens(SHAPE.sequences, SHAPE.tokens)).sum()
    return saved.total


def saved_said(adapter: AttachedAdapter | None) -> int:
    """The same by arithmetic: of full training, or of the frozen model with an adapter."""
    adapted = None
    if adapter is not None:
        method, sites = adapter.method, adapter.sites.values()
        each = {site: method.ledger(AdapterQuery(site, SHAPE)) for site in sites}
        kept = {site: ledger.bytes("activation") for site, ledger in each.items()}
        adapted = AdapterActivations.of(method, kept)
    return model_ledger(DEEP, SHAPE, adapted=adapted).bytes("activation", "loss")
