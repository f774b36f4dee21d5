"""The sections of a recipe: the settings of model, data, training and so on.

Fields, bounds and what they mean stand here; what they have to do with each other, in `recipe`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from modicum.core.contracts.method import PositiveFloat, PositiveInt, Probability, Strings
from modicum.core.errors import InputError
from modicum.core.units import BYTES_FORMAT, DURATION_FORMAT, Every, parse_bytes

ByteSize = Annotated[
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


def _check_save_every(value: Any) -> Any:
    return value if value == "auto" else _check_every(value)


_SAVE_FORMAT = f"a number of steps, or {DURATION_FORMAT}, or auto"
SaveInterval = Annotated[
    int | str,
    BeforeValidator(_check_save_every),
    WithJsonSchema({"type": ["integer", "string"], "description": _SAVE_FORMAT}),
]


class Section(BaseModel):
    """A part of a recipe: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class ModelSection(Section):
    """The model: trained weights from a folder, or a new one of a given shape."""

    path: str | None = None
    """A Hugging Face folder, the run folder of a full training, `package:NAME/FOLDER`, a folder of
    an installed Python package, or a model of the hub, `hub:OWNER/NAME,revision=...`. The fields of
    a shape below are then the model's own and must be left out."""
    trust_remote_code: bool = False
    """Whether Python files of the model's folder are run, which can do whatever you can. Only for
    a model that transformers does not have, and whose code you have read."""
    adapter: str | None = None
    """A folder with an adapter for it, modicum's or PEFT's, that training starts from. What the
    section `adapter` does not say is then what the folder has; a run keeps a copy."""
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

    @model_validator(mode="before")
    @classmethod
    def _linear_has_a_section(cls, values: Any) -> Any:
        if isinstance(values, dict) and "linear" in values:
            name = values["linear"]
            problem = (
                f"has a section of its own; write `linear: {{method: {name}}}` next to `model`"
            )
            raise InputError(problem, field="model.linear", value=name)
        return values


RowsFormat = Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt_completion"]


class SourceSection(Section):
    """One of several sources. What it leaves out (null) is as the section `data` has it."""

    path: str
    """A file, a folder or a data set of the hub, as in `data.path`."""
    weight: PositiveFloat | None = None
    """Its part of the sum of all weights is its share of an epoch's rows; all sources have one, or
    none, which means each row once an epoch."""
    include: Strings | None = None
    """Of a folder, the files to read."""
    exclude: Strings | None = None
    """Of those, the files to leave out."""
    format: RowsFormat | None = None
    """What its rows look like."""
    column: str | None = None
    """The column that holds the text to learn."""
    prompt_column: str | None = None
    """A column that comes before the text and is not learned."""
    limit: ByteSize | None = None
    """Read no more than this much of it."""


class DataSection(Section):
    """The data: text, or rows of examples."""

    path: str | None = None
    """A folder of text files, one text file, a file of rows such as .jsonl, or a data set of the
    Hugging Face hub: `hub:OWNER/NAME,config=...,split=...`; null means the source files of the
    Python standard library on this machine."""
    sources: Annotated[tuple[SourceSection, ...], Field(strict=False)] = ()
    """Several instead of `path`, mixed by `weight`; an epoch has as many rows as all together."""
    include: Strings = ()
    """Of a folder, the files to read, as patterns (`**/*.md`); empty means its JSONL and
    Parquet files, else its text files, else its tables."""
    exclude: Strings = ()
    """Of those, the files to leave out."""
    format: RowsFormat = "auto"
    """What rows look like; auto: by the columns of the first row, or text where columns are
    named."""
    column: str = "text"
    """The column that holds the text to learn, of rows of the format text."""
    prompt_column: str | None = None
    """A column that holds what comes before the text and is not learned."""
    chat_template: str | None = None
    """What writes conversations: chatml, llama-3, zephyr, alpaca, or a file with a Jinja template.
    null means the model's own, and of a new model whose tokenizer is trained here chatml."""
    train_on: Literal["all", "last"] = "all"
    """Of a conversation, which turns of the assistant are learned."""
    validation_path: str | None = None
    """Data to evaluate on, read like `path`; null means a part of `path`'s documents."""
    validation_fraction: Probability = 0.05
    """That part of the documents; 0 for no evaluation."""
    test_path: str | None = None
    """Data to test on, read like `path`: for one look when nothing is chosen any more, as by
    `evaluation.test`. null means a part of `path`'s documents."""
    test_fraction: Probability = 0.0
    """That part of the documents, the same ones with any seed; 0 for no test. The fraction of the
    validation is then one of the documents that are left."""
    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens in a row. The rows of files are examples, each in one piece and several to a row of
    tokens; text files are continuous, and split wherever a row ends."""
    too_long: Literal["truncate", "split", "drop", "refuse"] = "truncate"
    """What becomes of an example that is longer than a row. truncate: a conversation loses its
    earliest turns, each as one, and keeps its system turn; of another example, and where the last
    exchange alone is too long, tokens at the front of the prompt are left out; it is dropped where
    its answer alone fills a row; what has no prompt is split. split: it goes over several rows, the
    later ones without its prompt. drop: it is left out. refuse: the run does not begin. The plan
    and the report count them."""
    boundaries: bool = True
    """Whether attention stops at the documents' boundaries within a row."""
    tokenizer: str | None = None
    """A folder with tokenizer.json; null means the model's, or one trained on the data."""
    limit: ByteSize | None = None
    """Read no more than this much text; of several sources, of each."""
    streaming: bool = False
    """Whether rows are read, tokenized and packed as training asks for them, instead of once before
    it: for data that is larger than the disk, or that comes over the network."""
    shuffle_buffer: PositiveInt | None = None
    """Of a stream, how many documents are read at a time, packed and shuffled; null means 4,096; 1
    means that rows come in the order of the data."""

    @model_validator(mode="after")
    def _sources_are_weighed_alike(self) -> DataSection:
        if not self.sources:
            return self
        if self.path is not None:
            problem = "the data is named twice; keep data.path or data.sources"
            raise InputError(problem, field="data.path", value=self.path)
        bare = [n for n, each in enumerate(self.sources) if each.weight is None]
        if bare and len(bare) < len(self.sources):
            problem = "other sources have a weight and this one has none; give all one, or none"
            raise InputError(problem, field=f"data.sources.{bare[0]}.weight")
        return self


class EvaluationSection(Section):
    """Loss on data that is not trained on; before the first step and after the last in any case."""

    every: Interval = 200
    """Steps, or a duration."""
    rows: PositiveInt | Literal["all"] = 64
    """At most so many rows of the validation data, or all."""
    test: bool = False
    """Whether all rows of the test data are evaluated when the run ends, with the weights that it
    exports. Nothing else of the run depends on that."""
    metric: str = "loss"
    """What `keep_best` and `patience` go by, a metric of the task: `loss`; of text `token_accuracy`
    and `perplexity`, of images `accuracy` and `macro_f1`. The evaluation before training does not
    count."""
    better: Literal["auto", "lower", "higher"] = "auto"
    """Which values of it are better; auto knows it of all of these."""
    keep_best: bool = False
    """Whether the checkpoint of the best evaluation is kept, next to the newest, and its weights
    are what the run exports."""
    patience: PositiveInt | None = None
    """Stop after so many evaluations in a row of which none was better; null: never early."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """By how much a value must be better for `patience` to count it."""


class SamplesSection(Section):
    """Text that the model writes, before training and after."""

    prompts: Strings = ()
    """What to continue; empty means the beginnings of `count` validation documents."""
    count: Annotated[int, Field(ge=0)] = 2
    """How many documents to continue where no prompts are given; 0 for none."""
    tokens: PositiveInt = 64
    """Tokens to write."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the most likely token every time."""


class CheckpointSection(Section):
    """What is kept so that a run that dies resumes."""

    every: SaveInterval = "5m"
    """Steps, or a duration. auto: by what a save is measured to cost and `hours_between_failures`,
    so that saves and lost work together take the least time (Young 1974)."""
    hours_between_failures: PositiveFloat | None = None
    """How long all machines of the run together work until one of them fails, on average. null:
    not known; nothing is said of lost work then, and `every` is no `auto`."""
    keep: PositiveInt = 2
    """The newest so many."""
    asynchronous: bool | Auto = "auto"
    """Whether the state is copied in memory and written while training continues; auto: where the
    copy fits into the budget."""

    @model_validator(mode="after")
    def _auto_needs_a_rate(self) -> CheckpointSection:
        if self.every == "auto" and self.hours_between_failures is None:
            problem = "auto needs checkpoint.hours_between_failures, and it says nothing"
            raise InputError(problem, field="checkpoint.every", value="auto")
        return self


class ParallelSection(Section):
    """How several ranks share the work; nothing of it changes what is computed.

    A run that resumes may have other values here, and another number of ranks.
    """

    strategy: Literal["auto", "ddp", "fsdp", "zero"] = "auto"
    """ddp: every rank holds all weights. fsdp: ranks hold a part of them each (PyTorch's FSDP2).
    zero: every rank computes with a full copy, and holds a part of the weights that are trained
    and of their optimizer's state. auto: ddp where it fits, else fsdp."""
    shard: PositiveInt | None = None
    """With fsdp, how many ranks hold one copy of the weights between them (fewer than there are:
    hybrid sharding); null means all."""
    reshard_after_forward: bool = True
    """With fsdp, whether blocks give their gathered weights back between forward and backward."""
    bucket: ByteSize = 25_000_000
    """With ddp, bytes of gradients that are summed over the ranks at a time."""


class BudgetSection(Section):
    """What the run may spend."""

    memory: ByteSize | None = None
    """Bytes on the accelerator, or the process's resident size on a CPU, with what Python and torch
    hold; of each rank. null: no limit."""
    tensors: ByteSize | None = None
    """Bytes on the accelerator, or on a CPU those that the process may hold beyond Python and
    torch: as tight with any PyTorch on any machine. null: no limit."""
    ledger: Literal["auto", "traced"] = "auto"
    """How a plan knows what the model spends. traced: a block of each kind is run on tensors
    without memory. auto: by the arithmetic of the author where there is one, else traced."""

    @property
    def limits(self) -> bool:
        """Whether there is a limit, of the process or of its tensors."""
        return self.memory is not None or self.tensors is not None
