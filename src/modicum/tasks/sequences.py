"""The task of telling sequences apart by what a recurrent net remembers at their end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.contracts.method import Info, Method, NonNegativeFloat, PositiveInt
from modicum.core.errors import InputError
from modicum.core.machine.record import Reads
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import IGNORED
from modicum.data.images import DIGIT_CLASSES, DIGITS
from modicum.data.sampler import Sampler
from modicum.data.sequences import (
    LabelledSequences,
    SequenceBatch,
    delayed_recall,
    digits_by_rows,
)
from modicum.models import recurrent
from modicum.models.recurrent import RecurrentConfig, RecurrentNet
from modicum.recipe import Recipe
from modicum.tasks.base import BlockSample, Data, Inputs, Task
from modicum.tasks.metrics import class_metrics, class_sums, right_answers

_DIGIT_SIDE = 8
# What says how sequences are made, and is of no digit.
_OF_RECALL = ("length", "shortest", "classes", "noise", "sequences")


class SequenceClasses(Method):
    """Sequences into classes, by a recurrent net of one layer with tanh.

    Args:
        data: `recall` shows a class in the first step and noise after it, and asks for the class at
            the end; `digits` are scikit-learn's, a row of 8 pixels a step, 8 steps.
        length: steps of the longest sequence of recall.
        shortest: lengths are drawn from here to `length`; null: all are as long.
        classes: of recall; digits have ten.
        noise: deviation of recall's noise.
        sequences: how many of recall to train on; of digits, all that are not held out.
        held_out: how many to evaluate on.
        width: of the net's state.
        path: a folder of trained weights to start from, whose shape the model then has.

    >>> task = SequenceClasses(sequences=64, length=5, width=8).bind(None)
    >>> batch = task.rows(seed=0)[0].batch([0, 1])
    >>> model = recurrent.create(task.look(Recipe()).config, seed=0)
    >>> sorted(task.measures(task.evaluate(model, batch), count=2))
    ['accuracy', 'by_class', 'loss', 'macro_f1']
    """

    info = Info(
        name="sequences",
        title="Classes of sequences, with a recurrent net",
        room="tasks",
        paper="J. Elman, Finding structure in time, Cognitive Science 14, 1990",
        claim="a task for methods that work on a recurrent net",
        traits=("has_recurrence", "exact_resume"),
    )

    data: Literal["recall", "digits"] = "recall"
    length: Annotated[int, Field(ge=2)] = 12
    shortest: PositiveInt | None = None
    classes: Annotated[int, Field(ge=2)] = 4
    noise: NonNegativeFloat = 0.1
    sequences: PositiveInt = 1024
    held_out: Annotated[int, Field(ge=0)] = 256
    width: PositiveInt = 32
    path: str | None = None

    def bind(self, context: Any) -> SequenceTask:  # type: ignore[override]
        """The task; it asks nothing of a context."""
        return SequenceTask(self)


class SequenceInputs(Inputs):
    """A recipe's net and sequences, looked at."""

    @property
    def reads(self) -> Reads:
        """Sequences."""
        return "sequences"


class SequenceTask(Task[RecurrentNet, SequenceBatch, Inputs]):
    """Cross-entropy of a sequence's class at its last step, in nats, and the right answers."""

    name = "sequences"
    unit = examples = "sequences"
    metrics = ("loss", "accuracy", "macro_f1")

    def __init__(self, asked: SequenceClasses) -> None:
        self.asked, self.digits = asked, asked.data == "digits"
        self.classes = DIGIT_CLASSES if self.digits else asked.classes
        self.length = _DIGIT_SIDE if self.digits else asked.length
        self.channels = _DIGIT_SIDE if self.digits else asked.classes

    # Planning

    def look(self, recipe: Recipe) -> Inputs:
        """The shape of model and data.

        Raises:
            InputError: fields do not go together; or the folder is no such model, or one of other
                sequences.
        """
        asked = self.asked
        self._check()
        config = RecurrentConfig(self.channels, asked.width, self.classes)
        folder = None if asked.path is None else Path(asked.path)
        if folder is not None:
            inner = folder / "model"  # a run folder keeps its weights there
            folder = inner if (inner / recurrent.CONFIG).is_file() else folder
            found = recurrent.read_config(folder)
            if (found.channels, found.classes) != (config.channels, config.classes):
                raise InputError(
                    f"this model is for {found.classes} classes of sequences of {found.channels} "
                    f"channels, and {asked.data} has {config.classes} of {config.channels}",
                    field="task.path",
                    value=asked.path,
                )
            config = found
        count = DIGITS if self.digits else asked.sequences + asked.held_out
        described = f"{count} sequences of {self.length} steps ({asked.data})"
        return SequenceInputs(config, folder, described)

    def _check(self) -> None:
        asked = self.asked
        if self.digits:
            for name in _OF_RECALL:
                if getattr(asked, name) != type(asked).model_fields[name].default:
                    problem = "is of recall, and digits are what they are; leave it out"
                    raise InputError(problem, field=f"task.{name}", value=getattr(asked, name))
            if asked.held_out >= DIGITS:
                problem, most = "leaves no sequences to train on", f"less than {DIGITS}"
                raise InputError(problem, field="task.held_out", value=asked.held_out, allowed=most)
        if asked.shortest is not None and not 2 <= asked.shortest <= asked.length:
            allowed = f"from 2 to task.length ({asked.length})"
            problem = "is no length of a sequence here"
            raise InputError(problem, field="task.shortest", value=asked.shortest, allowed=allowed)

    def survey(self, recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
        """How many sequences are trained."""
        asked = self.asked
        return {"rows": DIGITS - asked.held_out if self.digits else asked.sequences, "exact": True}

    def row(self, recipe: Recipe) -> ModelQuery:
        """One sequence, whose steps count as tokens do; it has one label."""
        return ModelQuery(1, self.length)

    def example(self, config: RecurrentConfig, shape: ModelQuery) -> SequenceBatch:
        """Sequences of zeros."""
        rows = shape.sequences
        lengths = torch.full((rows,), shape.tokens)
        inputs = torch.zeros(rows, shape.tokens, config.channels)
        return SequenceBatch(inputs, lengths, torch.zeros(rows, dtype=torch.int64))

    def largest_bytes(self, config: RecurrentConfig, shape: ModelQuery) -> int:
        """Of all states of a micro-batch."""
        return shape.positions * config.width * shape.compute_bytes

    def has_test(self, recipe: Recipe) -> bool:
        """Nothing is held out for a test."""
        return False

    # Building

    def model(self, config: RecurrentConfig) -> RecurrentNet:
        """The recurrent net."""
        return RecurrentNet(config)

    def fill(self, model: RecurrentNet, inputs: Inputs, skip: Collection[str] = ()) -> None:
        """Read the folder's weights into a model that has memory."""
        assert inputs.model_folder is not None
        recurrent.fill(model, inputs.model_folder, skip)

    def rows(self, seed: int) -> tuple[LabelledSequences, LabelledSequences | None]:
        """The sequences to train on and to evaluate on, by the seed.

        Raises:
            InputError: scikit-learn is asked for its digits and is not there.
        """
        asked = self.asked
        if self.digits:
            return digits_by_rows(seed, asked.held_out)

        def made(count: int, first: int) -> LabelledSequences:
            return delayed_recall(
                count, length=asked.length, classes=asked.classes, noise=asked.noise, seed=seed,
                first=first, shortest=asked.shortest,
            )  # fmt: skip

        held = made(asked.held_out, asked.sequences) if asked.held_out else None
        return made(asked.sequences, 0), held

    def prepare(
        self, recipe: Recipe, inputs: Inputs, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> Data[SequenceBatch]:
        """Nothing is written: every rank makes its own."""
        training = recipe.training
        train, held = self.rows(training.seed)
        made = self.asked.model_dump(exclude={"width", "path"})
        identity = {"sequences": made, "seed": training.seed}
        sampler = Sampler(len(train), training.batch_size, training.seed)
        return Data(train, held, sampler, identity, counts={"rows": len(train)})

    def trial(self, config: RecurrentConfig, batch: SequenceBatch) -> BlockSample[SequenceBatch]:
        """The net itself, which has one block."""
        return BlockSample(config, batch)

    # In a step

    def outputs(self, model: RecurrentNet, batch: SequenceBatch) -> Tensor:
        """Logits [sequences, classes]."""
        logits: Tensor = model(batch.inputs, batch.last)
        return logits

    def loss_of(self, outputs: Tensor, batch: SequenceBatch) -> Tensor:
        """The sum of -log p(label) over the trained labels: fp32, one element."""
        return F.cross_entropy(outputs.float(), batch.labels, ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def evaluate(self, model: RecurrentNet, batch: SequenceBatch) -> dict[str, float]:
        """The sum of losses, how many answers are right, and counts of each class."""
        logits = self.outputs(model, batch)
        loss, right = float(self.loss_of(logits, batch)), right_answers(logits, batch.labels)
        return {"loss": loss, "accuracy": right, **class_sums(logits, batch.labels)}

    def measures(self, sums: Mapping[str, float], count: int) -> dict[str, Any]:
        """Means of loss and right answers, macro F1, and the accuracy by class."""
        means = super().measures({name: sums[name] for name in ("loss", "accuracy")}, count)
        return {**means, **class_metrics(sums, [str(n) for n in range(self.classes)])}

    # Afterwards

    def export(
        self,
        model: RecurrentNet,
        data: Data[SequenceBatch],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write config.json and model.safetensors, which a recipe's `task.path` reads."""
        recurrent.save(model, folder, write=write)
