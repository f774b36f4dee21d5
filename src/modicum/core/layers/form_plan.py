"""The plan of forms: which form each linear layer of a model takes, and how its blocks differ.

One value that config.json, the model on meta, ledgers, files and exports read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan

Argument = int | float | str | bool


@dataclass(frozen=True)
class LayerForm:
    """A linear form by its name, with the arguments that its layers are made with.

    >>> LayerForm("low_rank", {"rank": 3}).as_json()
    {'form': 'low_rank', 'rank': 3}
    """

    name: str = "dense"
    arguments: Mapping[str, Argument] = field(default_factory=dict, hash=False)

    def as_json(self) -> dict[str, Argument]:
        """The form as plain values."""
        return {"form": self.name, **self.arguments}

    @classmethod
    def from_json(cls, raw: Any, field: str = "form") -> LayerForm:
        """The form that `as_json` wrote.

        Raises:
            InputError: `raw` names no form, or an argument is no number, text or truth value.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("form"), str):
            problem = "a linear form is written as {form: its name, and its arguments}"
            raise InputError(problem, field=field, value=raw)
        arguments = {str(name): value for name, value in raw.items() if name != "form"}
        for name, value in arguments.items():
            if not isinstance(value, (int, float, str)):
                problem = "an argument of a form is a number, text, or true or false"
                raise InputError(problem, field=f"{field}.{name}", value=value)
        return cls(raw["form"], arguments)


DENSE_FORM = LayerForm()
_LIKE_OTHERS = BlockPlan()


@dataclass(frozen=True)
class FormPlan:
    """Which form each linear layer takes, and which blocks have widths or a wiring of their own.

    Args:
        default: the form of the layers that have none of their own.
        layers: the forms of the others, by the layer's full name.
        blocks: what blocks have of their own, by the block's full name (`model.layers.3`).

    >>> plan = FormPlan().with_form("model.layers.0.mlp.up_proj", "low_rank", rank=3)
    >>> plan.of("model.layers.0.mlp.up_proj").arguments, plan.of("model.layers.1.mlp.up_proj").name
    ({'rank': 3}, 'dense')
    """

    default: LayerForm = DENSE_FORM
    layers: Mapping[str, LayerForm] = field(default_factory=dict, hash=False)
    blocks: Mapping[str, BlockPlan] = field(default_factory=dict, hash=False)

    @property
    def plain(self) -> bool:
        """Whether all layers are dense and all blocks alike."""
        return self == FormPlan()

    def of(self, layer: str) -> LayerForm:
        """The form of the layer of this full name."""
        return self.layers.get(layer, self.default)

    def forms(self) -> list[LayerForm]:
        """Every form that it names, the default first."""
        return [self.default, *self.layers.values()]

    def with_form(self, layer: str, name: str, /, **arguments: Argument) -> FormPlan:
        """The plan in which one layer has the form of this name, made with these arguments."""
        return self.with_forms({layer: LayerForm(name, arguments)})

    def with_forms(self, forms: Mapping[str, LayerForm]) -> FormPlan:
        """The plan in which these layers have these forms."""
        changed = {**self.layers, **forms}
        own = {layer: form for layer, form in changed.items() if form != self.default}
        return replace(self, layers=own)

    def with_default(self, name: str, /, **arguments: Argument) -> FormPlan:
        """The plan in which layers that have no form of their own take this one."""
        default = LayerForm(name, arguments)
        own = {layer: form for layer, form in self.layers.items() if form != default}
        return replace(self, default=default, layers=own)

    def block(self, name: str) -> BlockPlan:
        """What the block of this full name has of its own."""
        return self.blocks.get(name, _LIKE_OTHERS)

    def with_block(self, name: str, /, **own: Any) -> FormPlan:
        """The plan in which the block of this full name has these fields of `BlockPlan`.

        Raises:
            InputError: a value is out of range.

        >>> FormPlan().with_block("model.layers.1", heads=2, mlp_skips=[1]).as_json()
        {'blocks': {'model.layers.1': {'heads': 2, 'mlp_skips': [1]}}}
        """
        try:
            return self.with_blocks({name: replace(self.block(name), **own)})
        except InputError as error:
            raise error.within(f"forms.blocks.{name}") from None

    def with_blocks(self, blocks: Mapping[str, BlockPlan]) -> FormPlan:
        """The plan in which these blocks have this of their own."""
        changed = {**self.blocks, **blocks}
        own = {name: block for name, block in changed.items() if block != _LIKE_OTHERS}
        return replace(self, blocks=own)

    def dense(self) -> FormPlan:
        """The same blocks with dense layers alone."""
        return FormPlan(blocks=self.blocks)

    def within(self, prefixes: Iterable[str]) -> FormPlan:
        """What it says of the layers and blocks whose names begin with one of these."""
        first = tuple(prefixes)
        layers = {name: form for name, form in self.layers.items() if name.startswith(first)}
        blocks = {name: own for name, own in self.blocks.items() if f"{name}.".startswith(first)}
        return FormPlan(self.default, layers, blocks)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, what is left at its default left out."""
        raw: dict[str, Any] = {}
        if self.default != DENSE_FORM:
            raw["default"] = self.default.as_json()
        if self.layers:
            raw["layers"] = {name: form.as_json() for name, form in self.layers.items()}
        if self.blocks:
            raw["blocks"] = {name: block.as_json() for name, block in self.blocks.items()}
        return raw

    @classmethod
    def from_json(cls, raw: Any) -> FormPlan:
        """The plan that `as_json` wrote.

        Raises:
            InputError: `raw` is no plan of forms, or gives a block what cannot differ.
        """
        parts = {"default": LayerForm().as_json(), "layers": {}, "blocks": {}}
        given = parts | raw if isinstance(raw, dict) else {}
        if given.keys() != parts.keys():
            problem = "a plan of forms is a section of these keys"
            raise InputError(problem, field="forms", value=raw, allowed=", ".join(parts))
        for key in ("layers", "blocks"):
            if not isinstance(given[key], dict):
                problem = "expected a section with keys"
                raise InputError(problem, field=f"forms.{key}", value=given[key])
        default = LayerForm.from_json(given["default"], "forms.default")
        layers = {
            name: LayerForm.from_json(each, f"forms.layers.{name}")
            for name, each in given["layers"].items()
        }
        blocks = {name: _block(name, each) for name, each in given["blocks"].items()}
        return cls(default, layers).with_blocks(blocks)


def _block(name: str, raw: Any) -> BlockPlan:
    try:
        return BlockPlan.from_json(raw)
    except InputError as error:
        raise error.within(f"forms.blocks.{name}") from None
