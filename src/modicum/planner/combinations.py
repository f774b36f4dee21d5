"""Which method runs with what, derived: every verdict is that of the rules over traits.

A row is a method in its tiny form, or one that has other traits by a field's value. A column asks
something of the recipe. `tests/contracts/test_combinations.py` trains every row on two ranks with
all that it allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.core.errors import InputError
from modicum.planner.choose import choices
from modicum.recipe import Recipe
from modicum.recipe.slots import slot_of

BASE = "{base}"  # the folder of a trained model
RANKS = 2
_TRAINED: dict[str, Any] = {"model": {"path": BASE}}
# What the rest of a recipe must say for a method with this trait.
NEEDS: dict[str, dict[str, Any]] = {
    "adapts_base": _TRAINED,
    "needs_trained_base": _TRAINED,
    "needs_convolutions": {
        "task": {"method": "images", "images": 96, "held_out": 16, "widths": [6, 6]}
    },
    "needs_recurrence": {
        "task": {"method": "sequences", "sequences": 96, "held_out": 16, "length": 5, "width": 12}
    },
    "frees_gradient_in_backward": {"training": {"clip_norm": None}},
    "needs_no_gradients": {"training": {"clip_norm": None}},
    "takes_no_rate": {"training": {"schedule": "constant"}},
    "quantized_base": {**_TRAINED, "adapter": {"method": "lora", "rank": 2}},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp": {"parallel": {"strategy": "fsdp", "reshard_after_forward": False}},
    "zero": {"parallel": {"strategy": "zero"}},
    "hybrid": {"parallel": {"strategy": "fsdp", "shard": 2}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"training": {"micro_batch_size": 2}},
    "clipping": {"training": {"clip_norm": 1.0}},
    "bf16": {"training": {"precision": "bf16"}},
    "recompute": {"training": {"recompute": "blocks"}},
    "compile": {"training": {"compile": "blocks"}},
    "adapters": {**_TRAINED, "adapter": {"method": "lora", "rank": 2}},
    "quantized": {"linear": {"method": "nf4"}},
}
COLUMNS = {
    "alone": "in ten lines of anybody's script",
    "transformers": "under transformers.Trainer",
    "export": "files that give the same model back",
    "one rank": "in a recipe, one process",
    "ddp": "two ranks, each with all weights",
    "fsdp": "two ranks, weights sharded (FSDP2)",
    "zero": "two ranks, optimizer state sharded",
    "hybrid": "four ranks, weights sharded between two (FSDP2)",
    "accumulation": "several micro-batches an update",
    "clipping": "gradients scaled by their norm",
    "bf16": "products in bfloat16",
    "recompute": "blocks run again in the backward pass",
    "compile": "blocks compiled",
    "adapters": "training a LoRA",
    "quantized": "on a 4-bit base",
}
PROVEN = ("alone", "transformers", "export")  # by checks of the batteries, not by rules


@dataclass(frozen=True)
class CombinationRow:
    """A method with some fields set.

    Args:
        fields: those of its tiny form, and one that gives it another trait.
        name: the method's, and that field.
    """

    record: MethodRecord
    fields: Mapping[str, Any]
    name: str

    @property
    def traits(self) -> frozenset[str]:
        """What these fields do to a run."""
        return self.record.traits(self.fields)

    def recipe(self, *settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """A recipe's sections with the method, what it needs, and these settings."""
        slot = slot_of(self.record)
        assert slot is not None
        values: dict[str, Any] = {}
        needed = [NEEDS[trait] for trait in sorted(self.traits & NEEDS.keys())]
        method = {slot: {"method": self.record.name, **self.fields}}
        for sections in (method, *needed, *settings):
            for section, fields in sections.items():
                values[section] = {**values.get(section, {}), **fields}
        return values


def rows() -> Iterator[CombinationRow]:
    """Every method that a recipe has a place for; tasks are what they work on."""
    for record in catalog().values():
        if record.room == "tasks" or slot_of(record) is None:
            continue
        tiny = dict(record.info.tiny)
        yield CombinationRow(record, tiny, record.name)
        for field, value in record.info.with_other_traits:
            yield CombinationRow(record, {**tiny, field: value}, f"{record.name}, {field}: {value}")


def ranks_of(strategy: str) -> int:
    """How many ranks a column of strategies is about.

    >>> ranks_of("hybrid"), ranks_of("fsdp")
    (4, 2)
    """
    return 2 * RANKS if strategy == "hybrid" else RANKS


def refusal(row: CombinationRow, column: str) -> InputError | None:
    """Why the row does not run with what the column asks for; None where it does."""
    tried = [(strategy, ranks_of(name)) for name, strategy in STRATEGIES.items()]
    if column == "one rank":
        tried = [({}, 1)]
    elif column in STRATEGIES:
        tried = [(STRATEGIES[column], ranks_of(column))]
    elif "crosses_wire" not in row.traits:
        tried.insert(0, ({}, 1))
    own = slot_of(row.record)
    if own in SETTINGS.get(column, {}):
        return InputError(f"{row.name}: it stands in the section {own} itself", field=own)
    refused: InputError | None = None
    for strategy, ranks in tried:
        try:
            next(choices(Recipe(**row.recipe(strategy, SETTINGS.get(column, {}))), "cpu", ranks))
        except InputError as error:
            refused = refused or error
        else:
            return None
    return refused
