"""What ordered factors do in a run: which prefix an update trains, what ranks cost, and pruning.

Each update one layer computes with a prefix of its components, which are drawn so that every width
of every layer comes once a cycle. A penalty on the norms of all suffixes drives what is not needed
to zero, and what has come near enough is pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import describe_parameter, metadata, trainable
from modicum.core.contracts.run_hooks import PassKind
from modicum.core.contracts.surgery import RowMap, Surgery, replace_parameter
from modicum.core.contracts.weight_terms import WeightTerm, row_squares
from modicum.core.errors import InputError
from modicum.core.random import bits
from modicum.core.ranks.sharding import is_sharded, own_part
from modicum.linears.base import FormContext
from modicum.linears.ordered import OrderedLinear


class OrderedSteps(WeightTerm):
    """The part of ordered layers in the updates of a run, alike on all ranks.

    In a loop of one's own: `after_backward()` before each step of the optimizer, `update()` after
    it, and `shrink(optimizer)` whenever pruned components are to leave memory.

    Args:
        context: the model that has the layers; without parameters, its own are trained.
        penalty: of the sum over all suffixes of their norms in both factors.
        threshold: components are pruned from where the product of both suffixes' norms is less.
        every: updates between prunings; None: at each epoch's end.
        ordered: whether prefixes are drawn.

    Attributes:
        layers: by name, those whose factors are trained.
        updates: how many were made.
    """

    def __init__(
        self,
        context: FormContext,
        *,
        penalty: float = 0.0,
        threshold: float = 0.0,
        every: int | None = None,
        ordered: bool = True,
    ) -> None:
        trained = context.parameters or dict(trainable(context.model))
        found = dict(context.model.named_modules())
        self.layers = {
            name: layer
            for name, layer in found.items()
            if isinstance(layer, OrderedLinear) and f"{name}.down" in trained
        }
        own = (f"{name}.{leaf}" for name in self.layers for leaf in ("down", "up"))
        super().__init__({name: trained[name] for name in own}, context.ranks)
        self.seed, self.penalty, self.threshold = context.seed, penalty, threshold
        self.every, self.ordered, self.updates = every, ordered, 0
        self._cycle: tuple[tuple[int, int], Tensor] | None = None
        self.before_update(1)

    # Which prefix

    def before_update(self, step: int) -> None:
        """Have one layer train with a prefix of its components, a function of seed and step."""
        self.updates = step - 1
        for layer in self.layers.values():
            layer.width = None
        if self.ordered and (drawn := self.drawn(step)) is not None:
            name, width = drawn
            self.layers[name].width = width

    def drawn(self, step: int) -> tuple[str, int] | None:
        """The layer of update number `step`, and how many components it has; None: none has any.

        As long as none is pruned every (layer, width) comes once in as many updates as there are.
        """
        total = sum(layer.kept for layer in self.layers.values())
        if not total:
            return None
        cycle, place = divmod(step - 1, total)
        if self._cycle is None or self._cycle[0] != (cycle, total):
            order = bits(total, seed=self.seed, name="prefixes", step=cycle).argsort(stable=True)
            self._cycle = (cycle, total), order
        at = int(self._cycle[1][place])
        for name, layer in self.layers.items():
            if at < layer.kept:
                return name, at + 1
            at -= layer.kept
        raise AssertionError("a place is in one of the layers")

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """A rehearsal has all components: the most that an update may take."""
        return self._at_full_width() if kind == "rehearse" else nullcontext()

    @contextmanager
    def _at_full_width(self) -> Iterator[None]:
        widths = {name: layer.width for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.width = None
        try:
            yield
        finally:
            for name, width in widths.items():
                self.layers[name].width = width

    # What ranks cost

    def term(self) -> tuple[float, Iterator[tuple[str, Tensor]]]:
        """The penalty, and its gradient on the rows of this rank."""
        squares = row_squares(self.parameters, self.ranks) if self.penalty else {}
        norms = {name: suffix_norms(each) for name, each in squares.items()}
        value = self.penalty * sum(float(each.sum()) for each in norms.values())
        return value, self._gradients(norms)

    def _gradients(self, norms: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, each in norms.items():
            part, before = own_part(self.parameters[name].detach())
            slope = (self.penalty * each.reciprocal().cumsum(0)).to(part.dtype)
            yield name, part * slope[before : before + len(part), None]

    # Pruning

    def importance(self) -> dict[str, Tensor]:
        """By layer, of each component the product of the norms of both suffixes it begins.

        float64 [r], never increasing.
        """
        squares = row_squares(self.parameters, self.ranks)
        return {
            name: suffix_norms(squares[f"{name}.down"], 0) * suffix_norms(squares[f"{name}.up"], 0)
            for name in self.layers
        }

    def prune(self) -> None:
        """Keep of each layer the components that are as important as the threshold, or more.

        The others are set to zero, and stay zero; `shrink`, or a surgery, takes them out of memory.
        """
        if self.threshold:
            for name, each in self.importance().items():
                if each.isfinite().all():
                    layer = self.layers[name]
                    layer.kept = min(layer.kept, int((each >= self.threshold).sum()))
            self._mask()

    def keep_share(self, share: float, places: Mapping[str, int] | None = None) -> None:
        """Keep the components with the most of their layer's energy for their work, within a share.

        Energy is the square of what a component multiplies isotropic inputs with; a later one never
        has more than those before it. No weight is changed, and another share gives back what this
        one leaves out, until the next update.

        Args:
            share: of the multiplications that dense layers of these shapes do.
            places: of convolutions, by the layer's name, at how many places of an image they
                compute; 1 by default.

        Raises:
            InputError: the share is negative or not finite, or places name no ordered layer.
        """
        places = places or {}
        if other := sorted(places.keys() - self.layers.keys()):
            problem = "the model has no ordered layer of this name"
            raise InputError(problem, field="places", value=other[0], candidates=self.layers)
        if not 0 <= share < float("inf"):
            raise InputError("must be a number, 0 or more", field="share", value=share)
        squares, gains, left = row_squares(self.parameters, self.ranks), [], 0.0
        work = {
            name: places.get(name, 1) * (layer.in_features + layer.out_features)
            for name, layer in self.layers.items()
        }
        for name, layer in self.layers.items():
            dense = layer.in_features * layer.out_features
            left += share * places.get(name, 1) * dense
            energy = squares[f"{name}.down"] * squares[f"{name}.up"]
            energy = energy.cummin(0).values / energy.sum().clamp(min=1e-300) / work[name]
            gains += [(-value, place, name) for place, value in enumerate(energy.tolist())]
            layer.kept = 0
        for _, _, name in sorted(gains):
            if (left := left - work[name]) < 0:
                break
            self.layers[name].kept += 1

    @torch.no_grad()
    def _mask(self) -> None:
        for name, layer in self.layers.items():
            if layer.kept == layer.rank:
                continue
            for leaf in ("down", "up"):
                for tensor in (self.parameters[f"{name}.{leaf}"], layer.get_parameter(leaf)):
                    part, before = own_part(tensor)
                    part[max(layer.kept - before, 0) :] = 0

    def after_optimizer(self, step: int, optimizer: object) -> None:
        """What is pruned stays zero, whatever momentum it had; prune where it is time."""
        self.updates = step
        self._mask()
        if self.every is not None and step % self.every == 0:
            self.prune()

    def epoch_end(self, epoch: int) -> None:
        """Prune, unless that is done by updates."""
        if self.every is None:
            self.prune()

    def update(self) -> None:
        """What a loop of one's own calls after the optimizer's step."""
        self.after_optimizer(self.updates + 1, None)
        self.before_update(self.updates + 1)

    @property
    def shrinking(self) -> dict[str, int]:
        """Of the layers with components to take out, how many stay: one that is zero, at least."""
        ranks = {name: max(layer.kept, 1) for name, layer in self.layers.items()}
        return {name: rank for name, rank in ranks.items() if rank < self.layers[name].rank}

    def shrink(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take pruned components out of memory, and out of the state of the optimizer.

        Outputs stay what they were, to the bit.

        Raises:
            InputError: parameters are sharded, or the optimizer keeps state in other shapes than
                theirs; nothing was changed.
        """
        ranks = self.shrinking
        for name, parameter in self.parameters.items():
            if is_sharded(parameter):
                problem = "is sharded over ranks; modicum's trainer makes such layers smaller"
                raise InputError(problem, field=name)
        changed: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, rank in ranks.items():
            for leaf in ("down", "up"):
                old = self.layers[name].get_parameter(leaf)
                new = nn.Parameter(old.detach()[:rank].clone(), old.requires_grad)
                describe_parameter(new, metadata(old))
                changed[f"{name}.{leaf}"] = old, new
        if optimizer is not None:
            pairs = {key: (*pair, _prefix(len(pair[1]))) for key, pair in changed.items()}
            replace_parameter(optimizer, pairs)
        for name, (_, new) in changed.items():
            layer, _, leaf = name.rpartition(".")
            self.layers[layer].register_parameter(leaf, new)
            self.parameters[name] = new

    # State

    def state_dict(self) -> dict[str, Any]:
        """How many updates were made, and what is kept of each layer."""
        kept = [layer.kept for layer in self.layers.values()]
        return {"updates": self.updates, "kept": torch.tensor(kept, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be after as many updates.

        Raises:
            InputError: it is of other layers.
        """
        kept = state["kept"].tolist()
        if len(kept) != len(self.layers):
            problem = "this state is of a model with another number of ordered layers"
            raise InputError(problem, value=len(kept), allowed=str(len(self.layers)))
        for layer, count in zip(self.layers.values(), kept, strict=True):
            layer.kept = min(count, layer.rank)
        self.before_update(int(state["updates"]) + 1)

    def close(self) -> None:
        """Have layers compute with all that they hold."""
        for layer in self.layers.values():
            layer.width = None


class ShrinkingSteps(OrderedSteps):
    """The same in a trainer that can change shapes: what is pruned leaves memory at once."""

    def surgery(self, step: int) -> Surgery | None:
        """Take out what is pruned by now."""
        ranks = self.shrinking
        if not ranks:
            return None
        gone = sum(self.layers[name].rank - rank for name, rank in ranks.items())
        layers = {name: {"rank": rank} for name, rank in ranks.items()}
        rows = {
            f"{name}.{leaf}": _prefix(rank)
            for name, rank in ranks.items()
            for leaf in ("down", "up")
        }
        return Surgery(f"takes {gone} components out of {len(ranks)} layers", layers, rows)


def suffix_norms(squares: Tensor, least: float = 1e-12) -> Tensor:
    """Of the rows' sums of squares [r] the norms of all suffixes: of rows i and later, [r].

    Args:
        least: is added under the root, so that the slope at zero is finite.

    >>> suffix_norms(torch.tensor([9.0, 16.0, 0.0]), 0).tolist()
    [5.0, 4.0, 0.0]
    """
    return (squares.flip(0).cumsum(0).flip(0) + least).sqrt()


def _prefix(rank: int) -> tuple[RowMap, ...]:
    return (RowMap(0, tuple(range(rank))),)
