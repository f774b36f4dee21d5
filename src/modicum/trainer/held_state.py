"""The state of a run in memory, between what was built with old shapes and what is with new ones.

Of a tensor that is sharded over ranks each rank holds its own part, in the host's memory, and gives
it back as it was. Only what belongs to a parameter whose rows move, or to a layer that becomes
dense, is gathered, one after the other; every rank holds all of what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.state import StateRegistry, View
from modicum.core.contracts.surgery import RowMap, Shape, Surgery, mapped
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import LayerForm
from modicum.core.layers.linear_forms import form_of, full_weight, make_linear
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import cut_alike, is_sharded, laid_like, whole
from modicum.trainer.held_optimizer import hand_over, moving

# What a run began with has no place in a surgery: it is compared, and does not change.
SKIPPED = {"inputs"}
# Who has state of a layer that becomes dense: the weights move, and the optimizer begins anew.
_MODEL, _OPTIMIZER = "model", "optimizer"
_FORGETS = {_MODEL, _OPTIMIZER}
Held = dict[str, dict[str, Any]]
"""The state by view and name."""


@dataclass(frozen=True)
class HeldPart:
    """This rank's part of a sharded tensor of this full shape."""

    local: Tensor
    shape: Shape


def hold(
    registry: StateRegistry,
    surgery: Surgery,
    shapes: Mapping[str, Shape],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Held:
    """All state, with rows moved by the surgery; every rank calls this, and nothing is changed yet.

    Args:
        shapes: of the model's parameters as they are now, by name.
        model, optimizer: as they are now.

    Raises:
        InputError: a method keeps state of a parameter that changes in another shape than its own,
            or of a layer that becomes dense; or no dense weight computes what such a layer does.
    """
    held: Held = {}
    for view in registry.views.values():
        if view.name not in SKIPPED:
            entries = view.read()
            gone = _gone(view, entries, surgery)
            rowed: set[str] = set()
            if view.name == _OPTIMIZER and optimizer is not None:
                rowed, lost = moving(optimizer, entries, surgery.rows, shapes)
                gone |= lost
            held[view.name] = {
                key: _held(view, key, value, surgery.rows, shapes, key in rowed)
                for key, value in entries.items()
                if key not in gone
            }
            if view.name == _MODEL:
                held[_MODEL] |= _merged(entries, surgery, model)
    return held


def _gone(view: View, entries: Mapping[str, Any], surgery: Surgery) -> set[str]:
    """The entries of a view that belong to tensors which layers lose as they become dense."""
    owners = {part for key in entries for part in key.split("/")}
    old = {name for names in surgery.replaced(owners).values() for name in names}
    gone = {key for key in entries if old & set(key.split("/"))}
    if gone and view.name not in _FORGETS:
        problem = f"becomes dense, and {view.name} keeps state of its tensors that no weight has"
        raise InputError(problem, field="surgery", value=min(gone))
    return gone


def _merged(entries: Mapping[str, Any], surgery: Surgery, model: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer that becomes dense, as its tensors in the state represent it."""
    found = {}
    for layer, names in surgery.replaced(entries).items():
        tensors = {name.rpartition(".")[2]: whole(entries[name].detach()) for name in names}
        found[f"{layer}.weight"] = _dense_weight(model.get_submodule(layer), tensors).cpu()
    return found


@torch.no_grad()
def _dense_weight(layer: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight that a layer like this one represents with these full tensors, by their names."""
    form = form_of(layer)
    assert form is not None
    like = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    made = make_linear(
        LayerForm(form.name, dict(form.arguments(layer))),
        layer.in_features, layer.out_features, False, like.device, like.dtype,
    )  # fmt: skip
    for name, tensor in tensors.items():
        getattr(made, name).copy_(tensor)
    return full_weight(made)


def _held(
    view: View,
    key: str,
    value: Any,
    rows: Mapping[str, tuple[RowMap, ...]],
    shapes: Mapping[str, Shape],
    rowed: bool,
) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    # An optimizer calls its state `parameter/moment`, a copy is `copy/parameter`.
    owner = next((part for part in key.split("/") if part in rows), None)
    if owner is not None and not view.per_rank and value.numel() > 1:
        if tuple(value.shape) != shapes[owner] and not rowed:
            raise InputError(
                f"{owner} changes its shape, and {view.name} keeps {key!r} of it as "
                f"{tuple(value.shape)}, which has no rows that a map could move; train with a "
                "method whose state is of its parameters' shapes",
                field="surgery",
                value=shapes[owner],
            )
        return mapped(whole(value), rows[owner]).cpu()
    if is_sharded(value):
        return HeldPart(value.to_local().cpu(), tuple(value.shape))
    return value.cpu()


def put_back(
    registry: StateRegistry,
    held: Held,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Give what `hold` gave to the views of what was built anew; `held` is used up.

    At the most there is all that was held, and the new model next to it: what an update holds too,
    whose gradients are as large.

    Args:
        optimizer: the new one.

    Raises:
        InputError: other views are there than before.
    """
    registry.check(held, SKIPPED)
    if optimizer is not None and ranks is not None and not ranks.alone:
        hand_over(held[_OPTIMIZER], optimizer, ranks)
    for view in registry.views.values():
        if view.name not in SKIPPED:
            entries = GivenBack(view, held.pop(view.name))
            view.write(entries if view.follows_tensors else dict(entries.items()))


class GivenBack(Mapping[str, Any]):
    """What was held of a view, each entry given once: so both copies of it are there for a moment.

    Args:
        view: of what was built anew.
        held: the entries; it is used up.
    """

    def __init__(self, view: View, held: dict[str, Any]) -> None:
        self._view, self._held, self._names = view, held, dict.fromkeys(held)

    def __getitem__(self, key: str) -> Any:
        return _laid_out(self._view, key, self._held.pop(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)


def _laid_out(view: View, key: str, value: Any) -> Any:
    if not isinstance(value, HeldPart):
        return value
    like = view.like(key)
    if like is None or not is_sharded(like):
        raise InputError(f"the state {key!r} of {view.name} was sharded over ranks, and is no more")
    local = value.local.to(like.device)
    if value.shape == tuple(like.shape):
        return laid_like(local, like)
    return cut_alike(local, like, value.shape[1])
