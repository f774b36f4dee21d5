"""A search for the layers that are worth a LoRA: each has a small one times a trained gate.

The gates of a block compete: they are T softmax(a) for its T layers, so their mean is 1. Factors
learn on one part of the examples, a on another that the factors never see, each by an optimizer of
its own and without weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.adapters.adapted_layer import wearers
from modicum.adapters.base import Factor
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.names import exactly, plain_name
from modicum.adapters.preparation import PreparationContext
from modicum.adapters.sites import Site
from modicum.core.clock import WIRE
from modicum.core.errors import InputError
from modicum.core.layers.calibration import example_count
from modicum.core.ranks.ranks import Ranks, peer_errors

NAME = "gate_search"  # of the adapter, while it is on the model


class GatedLayer(LoRALayer):
    """y = W x + b + s g B (A x), with the gate g of its place in its row."""

    @cached_property
    def place(self) -> tuple[str, int]:
        """Its row's parameter, and which entry there is its own."""
        names = [[site.name for site in row] for row in rows(self.shared.sites).values()]
        at = next(at for at, row in enumerate(names) if self.site.name in row)
        return f"row_{at}", names[at].index(self.site.name)

    def gate(self) -> Tensor:
        """T softmax(a) at its place."""
        name, place = self.place
        scores: Tensor = getattr(self.shared, name)
        return scores.softmax(0)[place] * len(scores)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.A, self.gate() * self.B

    def worth(self) -> float:
        """The gate where B has the norm 1: g B is the same with g halved and B doubled.

        Raises:
            InputError: B has not moved.
        """
        if not self.B.count_nonzero():
            problem = "the loss has no gradient at this layer; leave it out with `exclude`"
            raise InputError(problem, field="targets", value=self.site.name)
        return float(self.gate().detach() * self.B.detach().norm())


class GatedLoRA(LoRA):
    """LoRA with a gate a layer; all gates are 1 at first. It is for the search alone."""

    layer = GatedLayer

    def shared(self, sites: Sequence[Site]) -> dict[str, Factor]:
        return {f"row_{at}": Factor((len(row),)) for at, row in enumerate(rows(sites).values())}


@dataclass(frozen=True)
class GateSearch:
    """How gates are searched.

    Args:
        value: the small LoRA; where it is does not matter.
        steps: updates of the factors; in the first third of them the gates rest.
        rate, gate_rate: learning rates of the factors and of the gates.
        limit: stop after the batch that brings this rank's examples to as many.
    """

    value: LoRA
    steps: int
    rate: float
    gate_rate: float
    limit: int

    def run(self, context: PreparationContext) -> dict[str, float]:
        """The gate of each layer, alike on all ranks; the model is left as it was.

        Those of a row have the mean 1, and are compared as if each B had the same norm: else a
        layer whose B is large has a small gate.

        Raises:
            InputError: there are fewer than two batches, the loss has no gradient, at all or at a
                layer, or one is not finite.
        """
        model, names = context.model, [site.name for site in context.sites]
        parts = halves(context.batches, self.limit, context.ranks)
        fields = self.value.model_dump() | {"also": (), "dropout": 0.0}
        known = (site.name for site in GatedLoRA().candidates(model))
        value = GatedLoRA(**(fields | exactly(known, names)))
        before = [(module, module.active) for _, module in wearers(model)]
        attached = value.attach(model, name=NAME, seed=context.seed)
        try:
            self._search(context, dict(attached.named_parameters()), parts)
            worth = {
                n: each.worth() for n, each in attached.layers() if isinstance(each, GatedLayer)
            }
        finally:
            attached.detach()
            for module, active in before:
                module.active = active
        found: dict[str, float] = {}
        for row in rows(context.sites).values():
            total = sum(worth[site.name] for site in row)
            found |= {site.name: len(row) * worth[site.name] / total for site in row}
        agreed: dict[str, float] = context.ranks.broadcast(found)
        return agreed

    def _search(
        self,
        context: PreparationContext,
        parameters: dict[str, nn.Parameter],
        parts: tuple[list[Any], list[Any]],
    ) -> None:
        factors = [each for name, each in parameters.items() if not name.startswith("shared.")]
        gates = [each for name, each in parameters.items() if name.startswith("shared.")]
        of_factors = torch.optim.AdamW(factors, lr=self.rate, weight_decay=0.0)
        of_gates = torch.optim.Adam(gates, lr=self.gate_rate)
        first, second = parts
        for step in range(self.steps):
            _update(context, of_factors, factors, gates, first[step % len(first)])
            if step >= self.steps // 3:
                _update(context, of_gates, gates, factors, second[step % len(second)])
            context.progress(step + 1, self.steps)


def _update(
    context: PreparationContext,
    optimizer: torch.optim.Optimizer,
    moved: Sequence[nn.Parameter],
    still: Sequence[nn.Parameter],
    batch: Any,
) -> None:
    """Move some parameters by the gradient of the mean loss over all ranks' examples."""
    for parameters, on in ((moved, True), (still, False)):
        for parameter in parameters:
            parameter.requires_grad_(on)
    with torch.enable_grad():
        loss = context.loss(context.model, batch)
        if not loss.requires_grad:
            problem = "the loss has no gradient: none of the layers takes part in it"
            raise InputError(problem, field="loss")
        loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
    flat = at_least_fp32(torch.cat([each.flatten() for each in found]))
    (examples,) = context.ranks.sum(example_count(batch))
    if not context.ranks.alone:
        with context.ranks.clock(WIRE), peer_errors():
            dist.all_reduce(flat)
    if not flat.isfinite().all():
        raise InputError("its gradient is not finite; look at the data", field="loss")
    pieces = flat.div_(examples).split([each.numel() for each in found])
    for parameter, piece in zip(moved, pieces, strict=True):
        parameter.grad = piece.view(parameter.shape).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def rows(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """The layers that compete with each other: those of one block, by its name.

    A block is an entry of the outermost list of modules; layers in none are one row too.

    >>> names = ("h.0.attn.q", "h.0.mlp.up", "h.1.attn.q", "pool")
    >>> {row: len(each) for row, each in rows(Site(n, "linear", 2, 2) for n in names).items()}
    {'h.0': 2, 'h.1': 1, '': 1}
    """
    found: dict[str, list[Site]] = {}
    for site in sites:
        parts = plain_name(site.name).split(".")
        at = next((at for at, part in enumerate(parts[:-1]) if part.isdigit()), -1)
        found.setdefault(".".join(parts[: at + 1]), []).append(site)
    return found


def halves(batches: Iterable[Any], limit: int, ranks: Ranks) -> tuple[list[Any], list[Any]]:
    """Two parts of the batches that have none in common: every other one, from the first on.

    Args:
        limit: stop after the batch that brings the examples to as many.

    Raises:
        InputError: a rank has fewer than two.

    >>> halves([torch.zeros(4), torch.ones(4), torch.ones(4)], 5, Ranks())
    ([tensor([0., 0., 0., 0.])], [tensor([1., 1., 1., 1.])])
    """
    kept: dict[int, Any] = {}  # by identity: a batch that comes twice is one
    seen = 0
    for batch in batches:
        if id(batch) not in kept and (count := example_count(batch)):
            kept[id(batch)] = batch
            seen += count
        if seen >= limit and len(kept) > 1:
            break
    if (fewest := int(ranks.min(len(kept))[0])) < 2:
        problem = "the search needs examples of two disjoint parts: two batches a rank at least"
        raise InputError(f"{problem}; give more, or smaller ones", field="batches", value=fewest)
    found = list(kept.values())
    return found[::2], found[1::2]
