"""All settings of a run: one strict, typed value, the same in Python and in YAML.

Nothing here imports torch: a typo is reported in a fraction of a second. What needs the disk (do
the paths exist, does the data parse) is checked by `modicum.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError, model_validator

from modicum.core.contracts.catalog import MethodRecord, added
from modicum.core.contracts.method import NO_SECTION, Method, Strings, describe
from modicum.core.contracts.traits import TraitHolder, clashes
from modicum.core.errors import InputError
from modicum.recipe.auto_exchange import AUTO, check_auto, filled_auto, is_auto
from modicum.recipe.cost import CostSection
from modicum.recipe.nested import assign
from modicum.recipe.outputs import ExportSection, TrackingSection
from modicum.recipe.paths import anchored
from modicum.recipe.sections import (
    BudgetSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    ParallelSection,
    SamplesSection,
    Section,
)
from modicum.recipe.slots import DEFAULTS, SLOTS, filled, find_in, spelled
from modicum.recipe.streaming import check_streaming
from modicum.recipe.training import TrainingSection

# What the model section may say of a model that comes from a path.
_OF_A_PATH = ("path", "trust_remote_code", "adapter")


class Recipe(Section):
    """A run, as its user states it.

    Raises:
        InputError: names the field, its value, what is allowed, and the nearest match.

    >>> from modicum.recipe import Recipe
    >>> recipe = Recipe(training={"steps": 10}, budget={"memory": "2GB"})
    >>> recipe.budget.memory
    2000000000
    """

    task: dict[str, Any] | None = None
    """A method of the room `tasks`: another model, data and loss than those of text. null: text, by
    the sections `model` and `data`, which are of no use to other tasks."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    linear: dict[str, Any] | None = None
    """The form that linear layers take: a method of the room `linears`; null: dense ones."""
    adapter: dict[str, Any] | None = None
    """A method of the room `adapters` and its fields; null trains every weight."""
    compress: dict[str, Any] | None = None
    """A method of the room `compress`: the model is made smaller first, and then trained."""
    optimizer: dict[str, Any] = {"method": DEFAULTS["optimizer"]}  # noqa: RUF012 - pydantic copies
    """A method of the room `optim` and its fields."""
    transform: dict[str, Any] | None = None
    """What changes gradients before the optimizer sees them: a method of the room `optim`."""
    memory: dict[str, Any] | None = None
    """How saved activations are kept: a method of the room `memory`."""
    comm: dict[str, Any] | None = None
    """How several ranks exchange gradients and weights: a method of the room `comm`; auto: what is
    fastest on the measured link, of what changes no number and the methods in the list `among`."""
    diagnosis: dict[str, Any] | None = None
    """What is looked at in evaluations and reported, and changes nothing: a method of the room
    `adapters`."""
    watchdog: dict[str, Any] | None = None
    """Who looks for the rank that holds up the others, and changes nothing: a method of the room
    `comm`. On several ranks `modicum train` has `c4` where the recipe does not say null."""
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    samples: SamplesSection = SamplesSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()
    parallel: ParallelSection = ParallelSection()
    tracking: TrackingSection = TrackingSection()
    budget: BudgetSection = BudgetSection()
    cost: CostSection = CostSection()
    plugins: Strings = ()
    """Python files that define methods of your own."""

    def __init__(self, *given: object, **fields: Any) -> None:
        if given:
            raise InputError(
                f"Recipe(...) takes its sections by name, no {type(given[0]).__name__}; write "
                "modicum.Recipe(**fields) of a dict, modicum.recipe_yaml.load(path) of a file",
                allowed=", ".join(type(self).model_fields),
            )
        for slot in SLOTS:
            if isinstance(fields.get(slot), Method):
                fields[slot] = spelled(fields[slot])
        if fields.get("comm") == AUTO:
            fields["comm"] = {"method": AUTO}
        try:
            super().__init__(**fields)
        except ValidationError as error:
            place = error.errors()[0]["loc"]
            raise _with_home(describe(error, _siblings(place), prefix=""), place[-1]) from None

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        # These raise InputError, which pydantic passes through as it is.
        for index, plugin in enumerate(self.plugins):
            if not Path(plugin).is_file():
                problem = "there is no such file of methods"
                raise InputError(problem, field=f"plugins.{index}", value=plugin)
        try:
            added(self.plugins)
        except InputError as error:
            raise error.located(field="plugins") from None
        if self.comm is not None and is_auto("comm", self.comm):
            check_auto(self.comm, self.plugins)
        for slot, record in self.methods().items():
            record.validate(self.fields(slot), prefix=f"{slot}.")
        self._check_model()
        self._check_training()
        self._check_evaluation()
        check_streaming(self)
        self.refuse_clashes()
        return self

    def refuse_clashes(self, more: Iterable[str] = ()) -> None:
        """Refuse what does not combine.

        Args:
            more: traits of the run that the recipe does not know: how many ranks there are, and how
                they share the work.

        Raises:
            InputError: two parts of the run do not combine; with the reason.
        """
        for clash in clashes(self.parts(more)):
            field, _, name = clash.one.name.partition(" ")
            raise InputError(
                f"{name} does not combine with {clash.other.name}: {clash.why}", field=field
            )

    def __eq__(self, other: object) -> bool:
        # A default that is spelled out is no other recipe.
        return isinstance(other, Recipe) and self.plain() == other.plain()

    __hash__ = None  # type: ignore[assignment]

    def methods(self) -> dict[str, MethodRecord]:
        """The record of the method in each section that has one."""
        return {
            slot: find_in(slot, value, self.plugins)
            for slot in SLOTS
            if (value := getattr(self, slot)) is not None and not is_auto(slot, value)
        }

    def fields(self, slot: str) -> dict[str, Any]:
        """What the recipe says of the method in a section, without its name."""
        return {key: value for key, value in getattr(self, slot).items() if key != "method"}

    def method(self, slot: str) -> Method | None:
        """The value of the method in a section, where it names one; imports its file.

        Raises:
            InputError: its fields do not go together.
        """
        if getattr(self, slot) is None or is_auto(slot, getattr(self, slot)):
            return None
        kind = self.methods()[slot].load()
        try:
            return kind(**self.fields(slot))
        except InputError as error:  # of several fields together: each alone was checked before
            field = slot if error.field is None else f"{slot}.{error.field}"
            raise InputError(
                error.problem, field=field, value=error.value, allowed=error.allowed
            ) from None

    def parts(self, more: Iterable[str] = ()) -> list[TraitHolder]:
        """The parts of the run that have traits: its methods, and what the recipe asks of it."""
        training = self.training
        asked = {
            "run_clips": training.clip_norm is not None,
            "run_schedules": training.changes_rate,
            "run_sets_rate": training.sets_rate,
            "run_bf16": training.precision == "bf16",
            "run_compiles": training.compile == "blocks",
            "run_recomputes": training.recompute == "blocks",
            "run_random_base": self.model.path is None and (self.task or {}).get("path") is None,
            "run_trains_base": self.adapter is None,
        }
        parts = [
            TraitHolder(
                f"{slot}.method {record.name}",
                record.traits(self.fields(slot)),
                record.info.excludes,
            )
            for slot, record in self.methods().items()
        ]
        for kind in ("convolutions", "recurrence"):
            asked[f"run_without_{kind}"] = not any(f"has_{kind}" in p.traits for p in parts)
        run = frozenset(more) | {trait for trait, is_so in asked.items() if is_so}
        return [*parts, TraitHolder("the rest of the recipe", run)]

    def _check_model(self) -> None:
        model = self.model
        if model.adapter is not None and (model.path is None or self.adapter is None):
            needs = "model.path" if model.path is None else "the section adapter"
            raise InputError(
                f"training starts from this adapter; say with {needs} what it adapts and is",
                field="model.adapter",
                value=model.adapter,
            )
        if model.trust_remote_code and model.path is None:
            problem = "is for the code in a model's folder; name that with model.path"
            raise InputError(problem, field="model.trust_remote_code", value=True)
        if model.path is not None:
            own = sorted(model.model_fields_set.difference(_OF_A_PATH))
            if own:
                raise InputError(
                    "the model in model.path decides this; leave it out", field=f"model.{own[0]}"
                )
            return
        if model.width % model.heads and "heads" in model.model_fields_set:
            raise InputError(
                f"must divide model.width ({model.width})", field="model.heads", value=model.heads
            )
        if model.width % model.heads:
            raise InputError(
                f"must be a multiple of model.heads ({model.heads})",
                field="model.width",
                value=model.width,
            )
        if model.width // model.heads % 2:
            raise InputError(
                "width / heads must be even, for rotary positions",
                field="model.width",
                value=model.width,
            )
        if model.kv_heads is not None and model.heads % model.kv_heads:
            raise InputError(
                f"must divide model.heads ({model.heads})",
                field="model.kv_heads",
                value=model.kv_heads,
            )
        length = self.data.sequence_length
        if model.context is not None and model.context < length:
            if "sequence_length" in self.data.model_fields_set:
                problem = f"longer than the model's context ({model.context})"
                raise InputError(problem, field="data.sequence_length", value=length)
            problem = f"shorter than data.sequence_length ({length})"
            raise InputError(problem, field="model.context", value=model.context)

    def _check_training(self) -> None:
        training = self.training
        micro = training.micro_batch_size
        if isinstance(micro, int) and micro > training.batch_size:
            raise InputError(
                f"larger than training.batch_size ({training.batch_size})",
                field="training.micro_batch_size",
                value=micro,
            )
        if self.parallel.shard is not None and self.parallel.strategy in ("ddp", "zero"):
            raise InputError(
                "only fsdp has groups of ranks that share a copy of the weights",
                field="parallel.shard",
                value=self.parallel.shard,
            )

    def _check_evaluation(self) -> None:
        asked, data = self.evaluation, self.data
        if asked.test and self.task is None and not data.test_fraction and data.test_path is None:
            problem = "needs test data: set data.test_fraction or data.test_path"
            raise InputError(problem, field="evaluation.test", value=True)
        if not asked.keep_best and asked.patience is None:
            return
        field = "evaluation.keep_best" if asked.keep_best else "evaluation.patience"
        if self.task is None and not data.validation_fraction and data.validation_path is None:
            problem = "needs validation data: set data.validation_fraction or data.validation_path"
            raise InputError(problem, field=field)
        if asked.keep_best and any("changes_shapes" in part.traits for part in self.parts()):
            raise InputError(
                "a method of this recipe changes shapes on the way, and weights of earlier shapes "
                "cannot be exported at the end; leave it out",
                field=field,
            )

    def plain(self) -> dict[str, Any]:
        """The recipe as plain values, every field spelled out: what YAML and JSON hold.

        A model from a path has no shape of its own, so none is spelled out; nor is the learning
        rate of a method that has none.
        """
        values = self.model_dump(mode="json")
        if self.model.path is not None:
            values["model"] = {key: values["model"][key] for key in _OF_A_PATH}
        for slot, record in self.methods().items():
            values[slot] = filled(record, self.fields(slot))
            if "takes_no_rate" in record.traits(self.fields(slot)):
                values["training"].pop("learning_rate", None)
        if self.comm is not None and is_auto("comm", self.comm):
            values["comm"] = filled_auto(self.comm, self.plugins)
        return values

    def changed(self, **paths: Any) -> Recipe:
        """A recipe with fields changed, dots written as double underscores, checked again.

        >>> Recipe().changed(training__steps=5).training.steps
        5
        """
        values = self.model_dump(mode="json", exclude_unset=True)
        for path, value in paths.items():
            assign(values, path.replace("__", "."), value)
        return Recipe(**values)

    def anchored(self, folder: Path | None = None) -> Recipe:
        """The recipe with absolute paths; relative ones are of `folder`, or of where we work."""
        values = self.model_dump(mode="json", exclude_unset=True)
        return Recipe(**anchored(values, folder or Path.cwd()))


def _with_home(said: InputError, name: int | str) -> InputError:
    """The error, with the one place where a key of this name is known, where it is at another.

    Of a word instead of a section, with the section that was meant.
    """
    key = "method" if name in SLOTS else {"model": "path", "data": "path"}.get(str(name))
    word = said.value if isinstance(said.value, str) else ""
    if said.problem == NO_SECTION and key and re.fullmatch(r"[\w./-]{1,80}", word):
        meant = f"{name}: {{{key}: {said.value}}}"
        return InputError(said.problem, field=said.field, value=said.value, allowed=meant)
    if said.problem != "unknown key":
        return said
    sections = Recipe.model_fields.items()
    homes = [f"{s}.{name}" for s, each in sections if name in _fields_of(each.annotation)]
    homes += [str(name)] if name in Recipe.model_fields else []
    if len(homes) != 1:
        return said
    return InputError(
        said.problem, field=said.field, allowed=said.allowed, word=homes[0], candidates=homes
    )


def _fields_of(section: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(section, "model_fields", {})
    return found


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """The fields of the section in which an error is."""
    section: Any = Recipe
    for name in (name for name in location[:-1] if isinstance(name, str)):
        field = section.model_fields.get(name) if hasattr(section, "model_fields") else None
        section = field.annotation if field is not None else None
        if get_origin(section) is tuple:  # a list of sections
            section = get_args(section)[0]
    return list(getattr(section, "model_fields", {}))
