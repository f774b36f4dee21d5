"""The fields of a recipe that change what it spends, with values to try: from its sections and
the catalog.

A knob costs by what it touches, in this order: how the arithmetic is split, its precision, the
method, the rows, the shape of a new model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from modicum.core.contracts.method_record import MethodRecord
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import linear_form
from modicum.linears.base import LinearMethod
from modicum.recipe import Recipe, methods_for

EXACT, NUMERICS, METHOD, ROWS, SHAPE = range(5)
# Sections whose methods decide bytes, what changes least first; a task is what is learned.
_SLOTS = ("memory", "adapter", "optimizer", "linear", "compress")
# Whatever is in these only adds to a rank's bytes.
_ADDED = ("diagnosis", "transform", "comm")
# A method with one of these traits changes how numbers are held, and not what is trained.
_WIDTH = 4096  # of a layer by which forms are compared
_NUMERIC_TRAITS = {"quantized_base", "compresses_saved"}
# Fields of a task that say how large its examples are, and its new model.
_OF_TASKS = {"size": ROWS, "length": ROWS, "width": SHAPE, "widths": SHAPE}
# Fields that do nothing at 0, and that take as much at a smaller value.
_OFF_AT_ZERO = ("dropout", "drop_path", "momentum")
# From what everybody knows, over what a proof has found good, to what it found worse.
_VERDICTS = ("baseline", "better", "equal", "not shown here", "worse")


@dataclass(frozen=True)
class Knob:
    """A field, the values to try, the mildest first, and the rank of its cost."""

    cost: int
    field: str
    values: tuple[Any, ...]

    def apart(self, other: Knob) -> bool:
        """Whether both can be turned at once: neither's field is the other's, or within it."""
        one, two = f"{self._place}.", f"{other._place}."
        return not one.startswith(two) and not two.startswith(one)

    @property
    def of_the_adapter(self) -> bool:
        """Whether it changes what a file of the adapter holds."""
        return self.field.partition(".")[0] == "adapter" and self.field != "adapter.dropout"

    @property
    def _place(self) -> str:
        """The field, or the section of which a method decides everything."""
        return self.field.removesuffix(".method")


def tightening(recipe: Recipe, ranks: int = 1, layers: Sequence[str] = ()) -> list[Knob]:
    """Knobs by which a recipe might need less.

    Args:
        layers: the last names of those that the adapter changes.
    """
    training, model = recipe.training, recipe.model
    knobs = [*_exact(recipe, ranks)]
    if training.precision == "fp32":
        knobs.append(Knob(NUMERICS, "training.precision", ("bf16",)))
    knobs += _methods(recipe)
    if training.clip_norm is not None:
        # Saves nothing by itself; some methods ask for it.
        knobs.append(Knob(METHOD, "training.clip_norm", (None,)))
    if recipe.adapter is not None and len(layers) > 1:
        halves = [list(layers[: len(layers) // part]) for part in (2, 4, 8) if len(layers) >= part]
        knobs.append(Knob(METHOD, "adapter.targets", tuple(halves)))
    if recipe.task is not None:
        knobs += _of_the_task(recipe)
    if recipe.data.boundaries:
        knobs.append(Knob(ROWS, "data.boundaries", (False,)))
    knobs.append(Knob(ROWS, "data.sequence_length", fractions(recipe.data.sequence_length, 32)))
    knobs.append(Knob(ROWS, "training.batch_size", fractions(training.batch_size, ranks)))
    if model.path is None:
        knobs += _of_new_models(recipe)
    return _free(recipe, knobs)


def _of_the_task(recipe: Recipe) -> Iterator[Knob]:
    """Of a task with a model of its own, smaller examples and a smaller new model."""
    record, said = recipe.methods()["task"], recipe.fields("task")
    for name, cost in _OF_TASKS.items():
        value = said.get(name, record.defaults.get(name))
        if isinstance(value, int):
            values: tuple[Any, ...] = fractions(value, 1)
        else:
            widths = tuple(value or ())
            values = tuple([max(1, each // part) for each in widths] for part in (2, 4, 8))
        valid = tuple(each for each in values if _valid(record, {**said, name: each}))
        yield Knob(cost, f"task.{name}", valid if name in record.fields else ())


def _free(recipe: Recipe, knobs: Sequence[Knob]) -> list[Knob]:
    """Those with values. An adapter that training starts from is what its file holds."""
    given = recipe.model.adapter is not None
    return [knob for knob in knobs if knob.values and not (given and knob.of_the_adapter)]


def _exact(recipe: Recipe, ranks: int) -> Iterator[Knob]:
    """What leaves the arithmetic as it is."""
    training, section = recipe.training, recipe.parallel
    if training.micro_batch_size not in ("auto", 1):
        yield Knob(EXACT, "training.micro_batch_size", ("auto",))
    if training.compile == "blocks":
        yield Knob(EXACT, "training.compile", ("none",))
    if training.recompute == "none":
        yield Knob(EXACT, "training.recompute", ("blocks",))
    if recipe.checkpoint.asynchronous is True:
        yield Knob(EXACT, "checkpoint.asynchronous", ("auto",))
    if recipe.samples.tokens > recipe.data.sequence_length:  # shorter ones hold less than a step
        yield Knob(EXACT, "samples.tokens", fractions(recipe.samples.tokens, 16))
    if ranks == 1:
        return
    if section.strategy != "fsdp":
        yield Knob(EXACT, "parallel.bucket", fractions(section.bucket, 1_000_000))
    if section.strategy in ("ddp", "zero"):
        yield Knob(EXACT, "parallel.strategy", ("fsdp",))
        return
    if section.shard is not None:
        larger = [n for n in range(section.shard + 1, ranks + 1) if ranks % n == 0]
        yield Knob(EXACT, "parallel.shard", tuple(larger))
    if not section.reshard_after_forward:
        yield Knob(EXACT, "parallel.reshard_after_forward", (True,))


def _of_new_models(recipe: Recipe) -> Iterator[Knob]:
    model = recipe.model
    if not model.tied_embeddings:
        yield Knob(SHAPE, "model.tied_embeddings", (True,))
    if recipe.data.tokenizer is None:
        yield Knob(SHAPE, "model.vocabulary_size", fractions(model.vocabulary_size, 512))
    heads = model.heads if model.kv_heads is None else model.kv_heads
    shared = [count for count in range(heads - 1, 0, -1) if model.heads % count == 0]
    yield Knob(SHAPE, "model.kv_heads", tuple(shared))
    if model.mlp_width is not None:
        yield Knob(SHAPE, "model.mlp_width", fractions(model.mlp_width, 1))
    yield Knob(SHAPE, "model.layers", fractions(model.layers, 1))
    yield Knob(SHAPE, "model.width", fractions(model.width, 2 * model.heads))


def loosening(recipe: Recipe, ranks: int = 1, context: int | None = None) -> list[Knob]:
    """Knobs by which a recipe that has room might spend it, each with the most lavish value last.

    Args:
        context: the longest row that the model takes.
    """
    training, adapter = recipe.training, recipe.adapter
    knobs = []
    if training.recompute == "blocks":
        knobs.append(Knob(EXACT, "training.recompute", ("auto", "none")))
    if training.micro_batch_size not in ("auto", -(-training.batch_size // ranks)):
        knobs.append(Knob(EXACT, "training.micro_batch_size", ("auto",)))
    if ranks > 1 and recipe.parallel.strategy == "fsdp" and recipe.parallel.reshard_after_forward:
        knobs.append(Knob(EXACT, "parallel.reshard_after_forward", (False,)))
    if training.precision == "bf16":
        knobs.append(Knob(NUMERICS, "training.precision", ("fp32",)))
    if recipe.linear is not None and "linear" in _frozen_forms(recipe):
        knobs.append(Knob(NUMERICS, "linear", (*_larger_forms(recipe), None)))
    if adapter is not None:
        rank = {**recipe.methods()["adapter"].defaults, **adapter}.get("rank")
        if isinstance(rank, int):
            knobs.append(Knob(METHOD, "adapter.rank", multiples(rank, None)))
        knobs.append(Knob(METHOD, "adapter", (None,)))
    longer = multiples(recipe.data.sequence_length, context)
    knobs.append(Knob(ROWS, "data.sequence_length", longer))
    if recipe.model.path is None:
        knobs.append(Knob(SHAPE, "model.width", multiples(recipe.model.width, None)))
    return _free(recipe, knobs)


def _frozen_forms(recipe: Recipe) -> list[str]:
    """The sections whose method only holds frozen numbers in another way."""
    return [slot for slot, record in recipe.methods().items() if _cost(record) == NUMERICS]


def _larger_forms(recipe: Recipe) -> list[dict[str, Any]]:
    """The ways to hold frozen weights in more bytes, as sections, the one in most bytes last."""
    own = recipe.method("linear")
    assert isinstance(own, LinearMethod)
    least = _held(own.info.name, own.arguments(_WIDTH, _WIDTH))
    known = methods_for("linear", recipe.plugins).items()
    held = {name: _held(name) for name, record in known if _cost(record) == NUMERICS}
    names = [name for name in held if name != own.info.name and held[name] > least]
    return [{"method": name} for name in sorted(names, key=held.__getitem__)]


def _held(form: str, arguments: Mapping[str, Any] | None = None) -> int:
    """Bytes of a layer in a form, to compare it by; with the defaults of what is left out."""
    return linear_form(form).weight_bytes(_WIDTH, _WIDTH, **(arguments or {}))


def _methods(recipe: Recipe) -> Iterator[Knob]:
    """Other methods for the sections that can have one, and other fields of those that are there.

    Which of them spend less, or go with the recipe at all, is found out by trying.
    """
    present = recipe.methods()
    for slot in _SLOTS:
        known = present.get(slot)
        others = [
            record for name, record in methods_for(slot, recipe.plugins).items()
            if (known is None or name != known.name) and ... not in record.defaults.values()
        ]  # fmt: skip
        others.sort(key=lambda record: _VERDICTS.index(record.info.against.result))
        for cost in (NUMERICS, METHOD):
            alike = [record for record in others if _cost(record) == cost]
            yield from _other_methods(recipe, slot, alike, cost)
        if known is not None:
            yield from _fields(recipe, slot, known)
    if recipe.linear is not None and _cost(present["linear"]) == METHOD:
        yield Knob(METHOD, "linear", (None,))
    if recipe.compress is not None:  # before which the dense model is there
        yield Knob(METHOD, "compress", (None,))
    for slot in _ADDED:
        if slot in present:
            yield from _fields(recipe, slot, present[slot])
            yield Knob(METHOD, slot, (None,))


def _cost(record: MethodRecord) -> int:
    return NUMERICS if _NUMERIC_TRAITS & set(record.info.traits) else METHOD


def _other_methods(
    recipe: Recipe, slot: str, records: Sequence[MethodRecord], cost: int
) -> Iterator[Knob]:
    """One knob for methods that a section may name, or two where fields have to go."""
    said = recipe.fields(slot) if getattr(recipe, slot) is not None else {}
    named = [record.name for record in records if said.keys() <= record.defaults.keys()]
    yield Knob(cost, f"{slot}.method", tuple(named))
    rest = [
        {"method": record.name, **{k: v for k, v in said.items() if k in record.defaults}}
        for record in records
        if record.name not in named
    ]
    yield Knob(cost, slot, tuple(rest))


def _fields(recipe: Recipe, slot: str, record: MethodRecord) -> Iterator[Knob]:
    """A method's numbers made smaller and larger, its words and switches made others."""
    said = recipe.fields(slot)
    for name, (kind, default) in record.fields.items():
        value = said.get(name, default)
        cost = NUMERICS if name.endswith("bits") else METHOD
        for others in _others(name, kind, value):
            values = tuple(v for v in others if _valid(record, {**said, name: v}))
            yield Knob(cost, f"{slot}.{name}", values)
    if slot == "adapter" and (also := tuple(said.get("also", ()))):
        fewer = [list(also[: len(also) // 2])] if len(also) > 1 else []
        yield Knob(METHOD, "adapter.also", (*fewer, []))


def _others(name: str, kind: Any, value: Any) -> Iterator[tuple[Any, ...]]:
    """Values of a field to try for another one, the nearest first; down, and up."""
    if isinstance(value, bool):
        yield (not value,)
    elif words := _words(kind):
        if all(isinstance(word, int) for word in words):
            yield tuple(sorted((word for word in words if word < value), reverse=True))
        else:
            yield tuple(word for word in words if word != value)
    elif name in _OFF_AT_ZERO:
        yield (0.0,) if value else ()
    elif isinstance(value, int) and value > 1:
        yield fractions(value, 1)
        yield multiples(value, None)
    elif isinstance(value, float) and 0 < value <= 1:
        yield tuple(value / part for part in (2, 4, 8))
        if value < 1:
            yield tuple(round(1 - (1 - value) / part, 4) for part in (2, 4, 8))


def _words(kind: Any) -> tuple[Any, ...]:
    """The values of a literal, also where it is annotated or one of several types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    inner = getattr(kind, "__metadata__", None) and get_args(kind)[0]
    return _words(inner) if inner else ()


def _valid(record: MethodRecord, values: dict[str, Any]) -> bool:
    try:
        record.validate(values)
    except InputError:
        return False
    return True


def fractions(value: int, least: int) -> tuple[int, ...]:
    """A half, a quarter, an eighth and a sixteenth of a value, while it is not below `least`.

    >>> fractions(100, 20)
    (50, 25)
    """
    return tuple(value // part for part in (2, 4, 8, 16) if value // part >= least)


def multiples(value: int, most: int | None) -> tuple[int, ...]:
    """Twice, four and eight times a value, while it is not above `most`.

    >>> multiples(100, 500)
    (200, 400)
    """
    return tuple(value * part for part in (2, 4, 8) if most is None or value * part <= most)
