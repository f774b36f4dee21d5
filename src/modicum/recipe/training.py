"""The section of a recipe that says how long a run trains, how fast, and how much at a time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from modicum.core.contracts.method import PositiveFloat, PositiveInt, Probability, Seed
from modicum.core.errors import InputError
from modicum.core.units import COUNT_FORMAT, parse_count
from modicum.recipe.sections import Auto, Section

# The fields that say how long a run is, of which exactly one does, and those of its warm-up.
LENGTHS = ("steps", "epochs", "tokens")
WARMUPS = ("warmup_steps", "warmup_fraction", "warmup_tokens")
RunTokens = Annotated[
    int,
    BeforeValidator(parse_count),
    WithJsonSchema({"type": ["integer", "string"], "description": COUNT_FORMAT}),
]


class TrainingSection(Section):
    """How long, how fast, how much at a time."""

    steps: PositiveInt | None = 1000
    """Updates of the weights; null where `epochs` or `tokens` says how long."""
    epochs: PositiveFloat | None = None
    """How often the rows are gone through, instead of `steps`; 0.5 for half of them."""
    tokens: RunTokens | None = None
    """How many tokens of text are gone through, instead of `steps`, as in `2M`: all positions of
    the rows, prompts and padding among them, as speed is counted. The last update is a full one,
    so whatever the batch size, runs see the same rows up to one update."""
    learning_rate: PositiveFloat = 1e-3
    """The peak of the schedule."""
    batch_size: PositiveInt = 32
    """Sequences in an update, over all ranks."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Sequences in a forward pass; an update accumulates as many as it takes."""
    seed: Seed = 0
    """Reaches initial weights, data order, dropout and samples."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: products in bfloat16, frozen weights stored in it, trained ones in fp32. auto: bf16
    where an adapter is trained on weights that the model's files hold in bf16; else fp32."""
    recompute: Literal["auto", "none", "blocks"] = "auto"
    """Whether blocks forget their activations and compute them again in the backward pass."""
    schedule: Literal["constant", "linear", "cosine", "flat"] = "cosine"
    """How the learning rate falls after the warm-up. flat: it stays at its peak, and falls on a
    line at the end ("warm-up, stable, decay"; Hägele et al., arXiv 2405.18392)."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the schedule flat, the part of all updates in which it falls, the last ones; null means
    0.2."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which it rises from zero; a run of fewer steps ends while it rises."""
    warmup_fraction: Probability | None = None
    """The same as a part of all updates, instead of `warmup_steps`."""
    warmup_tokens: RunTokens | None = None
    """The same in tokens, counted as in `tokens`: it rises over the same rows whatever the batch
    size."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last update, as a part of its peak. 0 is what it would be one update
    later, so that no update is wasted."""
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

    @model_validator(mode="before")
    @classmethod
    def _others_leave_no_default_of_steps(cls, values: Any) -> Any:
        if isinstance(values, dict) and any(values.get(name) is not None for name in LENGTHS[1:]):
            return {"steps": None, **values}
        return values

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSection:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(
                f"the length of the run is given more than once; keep one of {_named(LENGTHS)}, "
                "and set the others to null",
                field=f"training.{given[-1]}",
                value=getattr(self, given[-1]),
            )
        if not given:
            raise InputError(
                "says nothing of how long to train",
                field="training.steps",
                value=None,
                allowed="a number of updates, or training.epochs or training.tokens instead",
            )
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> TrainingSection:
        given = [name for name in WARMUPS if getattr(self, name)]
        if len(given) > 1:
            raise InputError(
                f"the warm-up is given more than once; keep one of {_named(WARMUPS)}, and set the "
                "others to 0 or null",
                field=f"training.{given[-1]}",
                value=getattr(self, given[-1]),
            )
        return self

    @model_validator(mode="after")
    def _decay_is_of_flat(self) -> TrainingSection:
        if self.decay_fraction is not None and self.schedule != "flat":
            raise InputError(
                f"is for the schedule flat, and training.schedule is {self.schedule}; set that to "
                "flat, or this to null",
                field="training.decay_fraction",
                value=self.decay_fraction,
            )
        return self

    @property
    def length(self) -> tuple[str, float]:
        """The field that says how long the run is, and what it says."""
        field = next(name for name in LENGTHS if getattr(self, name) is not None)
        return f"training.{field}", getattr(self, field)

    @property
    def sets_rate(self) -> bool:
        """Whether the recipe says a learning rate, be it the default."""
        return "learning_rate" in self.model_fields_set

    @property
    def changes_rate(self) -> bool:
        """Whether the learning rate changes from update to update."""
        return self.schedule != "constant" or bool(self.warmup[1])

    @property
    def warmup(self) -> tuple[str, float]:
        """The field that says how long the learning rate rises, and what it says."""
        field = next((name for name in WARMUPS if getattr(self, name)), WARMUPS[0])
        return f"training.{field}", getattr(self, field)


def _named(fields: tuple[str, ...]) -> str:
    *first, last = (f"training.{name}" for name in fields)
    return f"{', '.join(first)} and {last}"
