"""Everything that a run can be told: one strict, typed value, the same in Python and in YAML.

Nothing here imports torch: a typo is reported in a fraction of a second. What needs the disk (do
the paths exist, does the data parse) is checked by `modicum.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from modicum.core.catalog import Record, catalog, find, of_value
from modicum.core.errors import InputError
from modicum.core.method import (
    Method,
    PositiveFloat,
    PositiveInt,
    Probability,
    Strings,
    describe,
)
from modicum.core.traits import Part, clashes
from modicum.core.units import BYTES_FORMAT, DURATION_FORMAT, Every, parse_bytes

Size = Annotated[
    int,
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "description": BYTES_FORMAT}),
]


def _check_every(value: Any) -> Any:
    Every.parse(value)
    return value


Interval = Annotated[
    int | str,
    BeforeValidator(_check_every),
    WithJsonSchema(
        {"type": ["integer", "string"], "description": f"a number of steps, or {DURATION_FORMAT}"}
    ),
]
Auto = Literal["auto"]
# The recipe's sections in which a method stands, and the room that it comes from.
SLOTS: dict[str, str] = {"adapter": "adapters"}
# What the model section may say of a model that comes from a path.
_OF_A_PATH = ("path", "linear")


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class ModelSection(Section):
    """The model: trained weights from a folder, or a new one of a given shape."""

    path: str | None = None
    """A Hugging Face folder, or the run folder of a full training. The fields below are then the
    model's own and must be left out."""
    layers: PositiveInt = 4
    """Decoder blocks."""
    width: PositiveInt = 256
    """Width of the residual stream."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt | None = None
    """Heads of keys and values (grouped-query attention); null means as many as `heads`."""
    mlp_width: PositiveInt | None = None
    """Inner width of the MLP; null means 8/3 of `width`, rounded up to a multiple of 32."""
    context: PositiveInt | None = None
    """Longest sequence, in tokens; null means `data.sequence_length`."""
    vocabulary_size: Annotated[int, Field(ge=257)] = 4096
    """Tokens of the tokenizer that is trained on the data: 256 bytes, one end, and merges."""
    tied_embeddings: bool = True
    """Whether input and output embeddings are one matrix."""
    mixer: Literal["attention"] = "attention"
    """The sequence mixer, by name."""
    mlp: Literal["swiglu"] = "swiglu"
    """The MLP, by name."""
    linear: Literal["dense"] = "dense"
    """The form of the linear layers, by name."""


class DataSection(Section):
    """The data: text files or JSONL."""

    path: str | None = None
    """A folder of text files, one text file, or a .jsonl file; null means the source files of the
    Python standard library on this machine."""
    include: Strings = ()
    """Of a folder, the files to read, as patterns (`**/*.md`); empty means its JSONL files or, when
    it has none, its text files."""
    exclude: Strings = ()
    """Of those, the files to leave out."""
    column: str = "text"
    """The column of a JSONL file that holds the text to learn."""
    prompt_column: str | None = None
    """A column that holds what comes before the text and is not learned."""
    validation_path: str | None = None
    """Data to evaluate on, read like `path`; null means a part of `path`'s documents."""
    validation_fraction: Probability = 0.05
    """That part of the documents; 0 for no evaluation."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens in a row; documents are packed into rows and cut at their ends."""
    boundaries: bool = True
    """Whether attention stops at the documents' boundaries within a row."""
    tokenizer: str | None = None
    """A folder with tokenizer.json; null means the model's, or one trained on the data."""
    limit: Size | None = None
    """Read no more than this much text."""


class OptimizerSection(Section):
    """The optimizer: AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    method: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Probability, Probability], Field(strict=False)] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled decay of matrices; biases and norms have none."""


class TrainingSection(Section):
    """How long, how fast, how much at a time."""

    steps: PositiveInt = 1000
    """Updates of the weights."""
    learning_rate: PositiveFloat = 1e-3
    """The peak of the schedule."""
    batch_size: PositiveInt = 32
    """Sequences in an update, over all ranks."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Sequences in a forward pass; an update accumulates as many as it takes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Reaches initial weights, data order, dropout and samples."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: products in bfloat16, frozen weights stored in it, trained ones in fp32."""
    recompute: Literal["auto", "none", "blocks"] = "auto"
    """Whether blocks forget their activations and compute them again in the backward pass."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which it rises from zero; a run of fewer steps ends while it rises."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate at the end, as a part of its peak."""
    clip_norm: PositiveFloat | None = 1.0
    """The largest norm of all gradients together; null for no clipping."""
    skip_limit: Annotated[int, Field(ge=0)] = 3
    """Updates in a row that may be skipped for a loss or gradient that is not finite; one more
    stops the run."""
    compile: Literal["auto", "none", "blocks"] = "auto"
    """Whether blocks are compiled, where that works and makes them faster; auto: tried where the
    run is long enough to win back the time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where it is there."""


class EvaluationSection(Section):
    """Loss on data that is not trained on; before the first step and after the last in any case."""

    every: Interval = 200
    """Steps, or a duration."""
    rows: PositiveInt = 64
    """At most so many rows of the validation data."""


class SamplesSection(Section):
    """Text that the model writes, before training and after."""

    prompts: Strings = ()
    """What to continue; empty means the beginnings of `count` validation documents."""
    count: Annotated[int, Field(ge=0)] = 2
    tokens: PositiveInt = 64
    """Tokens to write."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the most likely token every time."""


class CheckpointSection(Section):
    """What is kept so that a run that dies goes on."""

    every: Interval = "5m"
    """Steps, or a duration."""
    keep: PositiveInt = 2
    """The newest so many."""
    asynchronous: bool | Auto = "auto"
    """Whether the state is copied in memory and written while training goes on; auto: where the
    copy fits into the budget."""


class ParallelSection(Section):
    """How several ranks share the work; nothing of it changes what is computed.

    A run that goes on may have other values here, and another number of ranks.
    """

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """ddp: every rank holds all weights. fsdp: ranks hold a part of them each (PyTorch's FSDP2).
    auto: ddp where it fits."""
    shard: PositiveInt | None = None
    """With fsdp, how many ranks hold one copy of the weights between them (fewer than there are:
    hybrid sharding); null means all."""
    reshard_after_forward: bool = True
    """With fsdp, whether blocks give their gathered weights back between forward and backward."""
    bucket: Size = 25_000_000
    """With ddp, bytes of gradients that are summed over the ranks at a time."""


class BudgetSection(Section):
    """What the run may spend."""

    memory: Size | None = None
    """Bytes on the accelerator, or the process's resident size on a CPU; of each rank. null: no
    limit."""


class Recipe(Section):
    """A run, as its user states it.

    Raises:
        InputError: names the field, its value, what is allowed, and the nearest match.

    >>> from modicum.recipe import Recipe
    >>> recipe = Recipe(training={"steps": 10}, budget={"memory": "2GB"})
    >>> recipe.budget.memory
    2000000000
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    adapter: dict[str, Any] | None = None
    """A method of the room `adapters` and its fields; null trains every weight."""
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    samples: SamplesSection = SamplesSection()
    checkpoint: CheckpointSection = CheckpointSection()
    parallel: ParallelSection = ParallelSection()
    budget: BudgetSection = BudgetSection()
    plugins: Strings = ()
    """Python files that define methods of your own."""

    def __init__(self, **fields: Any) -> None:
        for slot in SLOTS:
            if isinstance(fields.get(slot), Method):
                fields[slot] = _spelled(fields[slot])
        try:
            super().__init__(**fields)
        except ValidationError as error:
            siblings = _siblings(error.errors()[0]["loc"])
            raise describe(error, siblings, prefix="") from None

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        # These raise InputError, which pydantic passes through as it is.
        for index, plugin in enumerate(self.plugins):
            if not Path(plugin).is_file():
                problem = "there is no such plugin file"
                raise InputError(problem, field=f"plugins.{index}", value=plugin)
        try:
            catalog(self.plugins)
        except InputError as error:
            raise error.located(field="plugins") from None
        for slot, record in self.methods().items():
            values = {k: v for k, v in getattr(self, slot).items() if k != "method"}
            record.validate(values, prefix=f"{slot}.")
        self._check_model()
        self._check_training()
        for clash in clashes(self.parts()):
            field, _, name = clash.one.name.partition(" ")
            raise InputError(
                f"{name} does not combine with {clash.other.name}: {clash.why}", field=field
            )
        return self

    def methods(self) -> dict[str, Record]:
        """The record of the method in each slot that has one."""
        records = {}
        for slot, room in SLOTS.items():
            value = getattr(self, slot)
            if value is None:
                continue
            names = [n for n, r in catalog(self.plugins).items() if r.room == room]
            if not isinstance(value.get("method"), str):
                raise InputError(
                    "names no method" if "method" not in value else "expected a method's name",
                    field=f"{slot}.method",
                    allowed=", ".join(names),
                )
            try:
                records[slot] = find(value["method"], self.plugins, room)
            except InputError as error:
                raise error.located(field=f"{slot}.method") from None
        return records

    def method(self, slot: str) -> Method | None:
        """The value of the method in a slot; imports its file."""
        value = getattr(self, slot)
        if value is None:
            return None
        kind = self.methods()[slot].load()
        return kind(**{key: field for key, field in value.items() if key != "method"})

    def parts(self) -> list[Part]:
        """The parts of the run that have traits: its methods, and what the recipe asks of it."""
        run = set()
        training = self.training
        if training.clip_norm is not None:
            run.add("run_clips")
        micro = training.micro_batch_size
        if isinstance(micro, int) and micro < training.batch_size:
            run.add("run_accumulates")
        if self.model.path is None:
            run.add("run_random_base")
        parts = [
            Part(f"{slot}.method {record.name}", frozenset(record.info.traits))
            for slot, record in self.methods().items()
        ]
        return [*parts, Part("the rest of the recipe", frozenset(run))]

    def _check_model(self) -> None:
        model = self.model
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
        if self.parallel.shard is not None and self.parallel.strategy == "ddp":
            raise InputError(
                "with ddp every rank holds all weights; only fsdp shards them",
                field="parallel.shard",
                value=self.parallel.shard,
            )

    def plain(self) -> dict[str, Any]:
        """The recipe as plain values, every field spelled out: what YAML and JSON hold.

        A model from a path has no shape of its own, so none is spelled out.
        """
        values = self.model_dump(mode="json")
        if self.model.path is not None:
            values["model"] = {key: values["model"][key] for key in _OF_A_PATH}
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


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path in nested dictionaries, making the sections on its way.

    Raises:
        InputError: the path goes through something that is no section.
    """
    *sections, last = path.split(".")
    place: Any = values
    for depth, name in enumerate(sections):
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise InputError("is a value, not a section", field=".".join(sections[: depth + 1]))
    place[last] = value


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed between two plain recipes, one line a field: `training.steps: 10 -> 20`."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines


def _spelled(value: Method) -> dict[str, Any]:
    fields = value.model_dump(mode="json", exclude_unset=True)
    return {"method": of_value(value).name, **fields}


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    """The fields of the section in which an error is."""
    section: Any = Recipe
    for name in location[:-1]:
        field = section.model_fields.get(name) if hasattr(section, "model_fields") else None
        section = field.annotation if field is not None else None
    return list(getattr(section, "model_fields", {}))
