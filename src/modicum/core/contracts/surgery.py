"""Surgery: at an agreed step some parameters of a run get another shape, and training continues.

A method asks for it by the member `surgery` of its run hook, after an update. What it returns is a
plain value: the arguments that the forms of some layers have from then on, and for each parameter
whose shape changes which of its rows stay. A trainer builds everything anew from the changed
configuration and moves the state by the maps; a run that resumes replays it.

State that belongs to a parameter is what is kept under its name. Of the parameter's own shape it
moves by the parameter's map, and of its rows by its map of rows; one number (a count of steps)
stays. With a parameter of which it keeps anything else an optimizer begins anew; of other methods
that is refused. A layer that becomes dense has the weight that its tensors represent; an optimizer
begins anew with that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Shape = tuple[int, ...]
"""Of a full parameter, whatever a rank holds of it."""


@dataclass(frozen=True)
class RowMap:
    """Which places along one dimension of a parameter stay, and in which order.

    Args:
        dimension: from 0.
        kept: `new[i] = old[kept[i]]` along it; each place once at most.

    Raises:
        InputError: nothing is kept, or something twice.
    """

    dimension: int
    kept: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.kept or len(set(self.kept)) < len(self.kept) or min(*self.kept, 0) < 0:
            problem = "a map of rows keeps at least one place, and each once at most, from 0"
            raise InputError(problem, field="kept", value=list(self.kept))
        if self.dimension < 0:
            raise InputError("must not be negative", field="dimension", value=self.dimension)

    def shape(self, before: Shape) -> Shape:
        """The shape that becomes of one.

        Raises:
            InputError: there is no such dimension, or no such place in it.

        >>> RowMap(1, (0, 2)).shape((4, 3))
        (4, 2)
        """
        if self.dimension >= len(before) or max(self.kept) >= before[self.dimension]:
            problem = f"keeps places along dimension {self.dimension} that {before} has not"
            raise InputError(problem, field="kept", value=max(self.kept))
        after = list(before)
        after[self.dimension] = len(self.kept)
        return tuple(after)


@dataclass(frozen=True)
class Surgery:
    """What changes at one step.

    Args:
        why: for people, such as "drops a rank of 4 layers".
        layers: the arguments that the forms of these layers have from here on, by the layer's name
            in the model; those that are not named stay.
        rows: by the parameter's name the maps, one a dimension, of all whose shape changes.
        dense: layers that are dense from here on.
    """

    why: str
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: Mapping[str, tuple[RowMap, ...]] = field(default_factory=dict)
    dense: tuple[str, ...] = ()

    def as_json(self) -> JsonObject:
        """The value as JSON, from which `from_json` makes it again."""
        return {
            "why": self.why,
            **({"dense": list(self.dense)} if self.dense else {}),
            "layers": {name: dict(arguments) for name, arguments in self.layers.items()},
            "rows": {
                name: [{"dimension": each.dimension, "kept": list(each.kept)} for each in maps]
                for name, maps in self.rows.items()
            },
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Surgery:
        """The value that `as_json` spelled; other keys are passed over.

        Raises:
            InputError: it is none.

        >>> one = Surgery("smaller", {"up": {"rank": 2}}, {"up.down": (RowMap(0, (1, 3)),)})
        >>> Surgery.from_json(one.as_json()) == one
        True
        """
        try:
            return cls(
                str(value["why"]),
                {str(name): dict(arguments) for name, arguments in value["layers"].items()},
                {
                    str(name): tuple(
                        RowMap(int(each["dimension"]), tuple(int(place) for place in each["kept"]))
                        for each in maps
                    )
                    for name, maps in value["rows"].items()
                },
                tuple(str(name) for name in value.get("dense", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError("is no surgery as a run writes it", field="surgery") from None

    def replaced(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Of these names those of the tensors that each layer has no more once it is dense.

        >>> Surgery("merges", dense=("up",)).replaced(["up.down", "up.up", "up.bias", "head.up"])
        {'up': ['up.down', 'up.up']}
        """
        found: dict[str, list[str]] = {layer: [] for layer in self.dense}
        for name in names:
            layer, _, leaf = name.rpartition(".")
            if layer in found and leaf not in ("bias", "weight"):
                found[layer].append(name)
        return found

    @property
    def weights(self) -> set[str]:
        """The parameters that the layers have once they are dense."""
        return {f"{layer}.weight" for layer in self.dense}

    def check(self, before: Mapping[str, Shape], after: Mapping[str, Shape]) -> None:
        """Make sure that the maps lead from a model's shapes to those of the changed one.

        Args:
            before: the shape of every parameter by its name.
            after: the same of the changed model.

        Raises:
            InputError: they lead elsewhere, or parameters come or disappear.
        """
        old = self.replaced(before)
        if unformed := [layer for layer, names in old.items() if not names]:
            problem = "becomes dense, and is no layer of another form"
            raise InputError(problem, field="surgery", value=unformed[0])
        gone = {name for names in old.values() for name in names}
        before = {name: shape for name, shape in before.items() if name not in gone}
        after = {name: shape for name, shape in after.items() if name not in self.weights}
        if different := sorted(before.keys() ^ after.keys())[:3]:
            problem = "adds or removes parameters, and a map of rows makes none of nothing"
            raise InputError(problem, field="surgery", value=", ".join(different))
        if unknown := sorted(self.rows.keys() - before.keys())[:3]:
            problem = "maps rows of parameters that the model does not have"
            raise InputError(
                problem,
                field="surgery",
                value=", ".join(unknown),
                candidates=before,
                word=unknown[0],
            )
        for name, shape in before.items():
            try:
                made = mapped_shape(shape, self.rows.get(name, ()))
            except InputError as error:
                raise error.within(f"surgery.{name}") from None
            if made != after[name]:
                problem = f"its rows are mapped to {made}, and its layer has {after[name]}"
                raise InputError(problem, field=f"surgery.{name}", value=shape)


def mapped_shape(shape: Shape, maps: Sequence[RowMap]) -> Shape:
    """The shape that becomes of one by all of these maps.

    Raises:
        InputError: as `RowMap.shape`.
    """
    for each in maps:
        shape = each.shape(shape)
    return shape


def mapped(value: Tensor, maps: Sequence[RowMap]) -> Tensor:
    """A full tensor's rows, moved by all of these maps: a new one, on its device.

    >>> import torch
    >>> mapped(torch.arange(6).view(3, 2), [RowMap(0, (0, 2)), RowMap(1, (1,))]).tolist()
    [[1], [5]]
    """
    import torch

    for each in maps:
        places = torch.tensor(each.kept, device=value.device)
        value = value.index_select(each.dimension, places)
    return value


def replace_parameter(
    optimizer: torch.optim.Optimizer,
    changed: Mapping[str, tuple[nn.Parameter, nn.Parameter, Sequence[RowMap]]],
) -> None:
    """Have an optimizer train other parameters instead, with the rows that these keep of its state.

    Args:
        changed: by name the parameter, the one in its stead, and the maps from one to the other.

    Raises:
        InputError: state of one is neither of its shape nor one number; nothing was changed.
    """
    import torch

    for name, (old, _, _) in changed.items():
        for key, value in optimizer.state.get(old, {}).items():
            if torch.is_tensor(value) and value.numel() > 1 and value.shape != old.shape:
                problem = (
                    f"its optimizer keeps {key!r} in another shape, which no map of rows moves"
                )
                raise InputError(problem, field=name, value=tuple(value.shape))
    new_of = {old: new for old, new, _ in changed.values()}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]
    for old, new, maps in changed.values():
        if old in optimizer.state:
            optimizer.state[new] = {
                key: mapped(value, maps)
                if torch.is_tensor(value) and value.shape == old.shape
                else value
                for key, value in optimizer.state.pop(old).items()
            }
