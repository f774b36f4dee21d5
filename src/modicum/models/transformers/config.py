"""The shape of a decoder of transformers: its config.json as it stands, and what follows from it.

Which architecture that is, transformers knows by the file's `model_type`. Nothing is named here.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan
from modicum.models.config_checks import FORMED
from modicum.models.transformers.kinds import HeadKind
from modicum.models.transformers.shape import TransformersShape


@dataclass(frozen=True)
class TransformersConfig(TransformersShape):
    """The shape of a decoder of transformers, with what is known of its model without building it.

    Raises:
        InputError: this transformers has no such decoder.
    """

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], file: str | Path | None = None) -> TransformersConfig:
        """The configuration of a config.json; `file` is named in errors.

        Raises:
            InputError: transformers is missing or too old, or has no such decoder of text alone; or
                its blocks are to be other than the model's.
        """
        try:
            made = _formed(cls, raw)
            made.parameter_shapes()
            seen = _shown(made._text)
            caches = seen.caches and made._facts.mixers <= seen.mixers
            made = replace(made, packing=seen.packing, caches=caches)
        except InputError as error:
            raise error.located(file=file) from None
        return made

    @property
    def _text(self) -> str:
        return json.dumps(self.raw, sort_keys=True)

    @property
    def _facts(self) -> _Facts:
        return _facts(self._text, self.head)

    def packs(self, tokens: int) -> bool:
        """Whether documents that share a row of so many tokens are computed as each alone."""
        return self.packing_of(tokens) != "none"

    def check(self) -> None:
        """Make sure that no logits depend on later tokens.

        Raises:
            InputError: they do, or it cannot be shown that they do not.
        """
        if (why := _shown(self._text).refused) is not None:
            raise InputError(why, field="model_type", value=self.model_type)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, as the model has them; shared ones once.

        Linear layers whose form takes no gradients are dense there; of others, what `forms` says.
        """
        dense = self._facts
        if self.forms == FormPlan():
            return dict(dense.shapes)
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in dense.shapes.items():
            path, _, leaf = name.rpartition(".")
            form = self.forms.of(path) if path in dense.layers else DENSE_FORM
            if form == DENSE_FORM or leaf != "weight":
                found[name] = shape
                continue
            from modicum.core.layers.linear_forms import linear_form

            own = linear_form(form.name).shapes(*dense.layers[path], **form.arguments)
            found |= {f"{path}.{key}": size for key, size in own.items()}
        return found

    def to_formed(self) -> dict[str, Any]:
        """The config.json of a folder whose layers are in these forms, which modicum alone reads.

        Its type is another, since transformers would begin what it does not find anew.
        """
        raw = self.to_hf()
        names = [f"Forms{name}" for name in raw.get("architectures") or []]
        own = {"model_type": FORMED + self.model_type, "architectures": names}
        return raw | own | {"forms": self.forms.as_json()}

    def layers(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of every dense linear layer, by its full name."""
        return self._facts.layers

    @property
    def exact(self) -> frozenset[str]:
        """Names of what the model keeps in fp32, whatever dtype other parameters have."""
        return self._facts.exact

    @property
    def unreached(self) -> frozenset[str]:
        """Names of linear layers whose weights get no gradient, as a small model shows."""
        return _unreached(self._text, self.head)

    def block_prefixes(self) -> Sequence[str]:
        """How the names of each block's parameters begin."""
        return self._facts.prefixes

    def parameter_count(self) -> int:
        """How many numbers the model learns; shared ones count once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def shortened(self, vocabulary_size: int) -> TransformersConfig:
        """The model of its first block alone, with so many tokens."""
        from modicum.models.transformers.reduced import one_block

        raw = one_block(self.raw, vocabulary_size)
        first = self.block_prefixes()[0]
        return replace(self, raw=raw, forms=self.forms.within([first]))


def _formed(kind: type[TransformersConfig], raw: Mapping[str, Any]) -> TransformersConfig:
    """The configuration of a config.json that may say forms of layers, as `to_formed` wrote it."""
    if "forms" not in raw:
        return kind(dict(raw))
    forms = FormPlan.from_json(raw["forms"])
    if forms.blocks:
        problem = "blocks of this type of model are as transformers has them"
        raise InputError(problem, field="forms.blocks", value=raw.get("model_type"))
    plain = {key: value for key, value in raw.items() if key != "forms"}
    names = [str(name).removeprefix("Forms") for name in raw.get("architectures") or []]
    named = str(raw.get("model_type")).removeprefix(FORMED)
    return kind(plain | {"model_type": named, "architectures": names}, forms=forms)


@dataclass(frozen=True)
class _Facts:
    """What is known of a model without its numbers."""

    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, tuple[int, int]]
    prefixes: tuple[str, ...]
    exact: frozenset[str]
    mixers: frozenset[str]


@functools.lru_cache(maxsize=8)
def _facts(text: str, head: HeadKind) -> _Facts:
    from modicum.core.layers.dense_layers import all_layers
    from modicum.core.layers.meta import on_meta
    from modicum.models.transformers.buffers import exact_tensors
    from modicum.models.transformers.model import build, mixers

    with on_meta():
        model = build(TransformersShape(json.loads(text), head=head))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    layers = {n: (site.in_features, site.out_features) for n, site in all_layers(model).items()}
    prefixes = tuple(f"{model.blocks_name}.{number}." for number in range(len(model.blocks)))
    return _Facts(shapes, layers, prefixes, exact_tensors(model), mixers(model))


@functools.lru_cache(maxsize=8)
def _unreached(text: str, head: HeadKind) -> frozenset[str]:
    from modicum.models.transformers.reached import unreached

    return unreached(json.loads(text), _facts(text, head).layers, head)


@functools.lru_cache(maxsize=8)
def _shown(text: str) -> Any:
    from modicum.models.transformers.shown import shown

    return shown(json.loads(text))
