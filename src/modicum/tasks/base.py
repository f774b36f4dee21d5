"""What a task is: everything of a run that knows what is learned, and from what.

Planner and trainer ask the task; they know rows, batches with a count, a model with blocks, and
sums of losses. One convention holds for all: a rank returns *sums* of losses and of other measures
with the *count* of what was summed, and whoever scales by the global count gets gradients and
metrics that add up over micro-batches and ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.surgery import Surgery
from modicum.core.errors import InputError
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine.record import Reads
from modicum.core.progress import StageProgress
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.data.rows import AnyBatch, Rows
from modicum.data.sampler import Sampler
from modicum.recipe import Recipe
from modicum.tasks.metrics import BETTER
from modicum.tasks.parts import HoldsOut

# Of each tensor that represents a parameter, how many rows it has and the bytes of one.
Tensors = tuple[tuple[int, int], ...]


class Config(Protocol):
    """The shape of a model, known without the model."""

    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones once."""

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the model's order."""

    def block_prefixes(self) -> Sequence[str]:
        """How the names of each block's parameters begin, in the order in which blocks run."""


class TaskModel(Protocol):
    """What a trainer does with a model, calling it apart; an `nn.Module` that is built on meta."""

    recompute: bool
    """Whether blocks forget their activations and compute them again in the backward pass."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The parts that are gathered, recomputed and compiled one at a time, in order."""

    def initialise(self, seed: int) -> Any:
        """Fill every parameter as a function of (seed, its name); a rank, its part of it."""


@dataclass(frozen=True)
class Inputs:
    """A recipe's model and data, looked at but not read in full; tasks add what they found.

    Args:
        config: of the model, as far as it is known before the data is prepared.
        model_folder: where the trained weights are that the run starts from; None for a new model.
        described: the data, in words.
        weights: whether the folder holds them; a plan needs shapes alone.
        dtypes: of the folder's tensors, by safetensors' names (F32, BF16, F16).
    """

    config: Any
    model_folder: Path | None
    described: str
    weights: bool = field(default=True, kw_only=True)
    dtypes: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def reads(self) -> Reads:
        """What the run reads, whose runs show what this one comes to hold, and how fast it is.

        Of a task that is none of these, the nearest: by default runs on images, which read no text.
        """
        return "images"


B = TypeVar("B", bound=AnyBatch)
M = TypeVar("M", bound=nn.Module)
I = TypeVar("I", bound=Inputs)  # noqa: E741 - the inputs that a task itself has found


@dataclass(frozen=True)
class Data(Generic[B]):
    """Prepared data and the order in which its rows are taken; tasks add what else they made.

    Args:
        identity: what a run that resumes must find again (JSON).
        files: what goes next to the exported weights, such as a tokenizer's files.
        counts: of what is trained; `rows`, and what else the task counts (JSON).
        test: what is looked at once, when nothing is chosen any more; training never sees it.
    """

    train: Rows[B]
    validation: Rows[B] | None
    sampler: Sampler
    identity: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)
    test: Rows[B] | None = None


@dataclass(frozen=True)
class BlockSample(Generic[B]):
    """The shape of the smallest model that has one of the run's blocks, and a batch that fits it.

    The first of its blocks is the one that is tried.
    """

    config: Any
    batch: B


class Task(ABC, Generic[M, B, I]):
    """Model, data, loss and metrics under one name; a value without state.

    Attributes:
        name: what a recipe calls it.
        unit: what losses are counted in, as a plural for people (`tokens`, `images`).
        metrics: what `measures` gives as numbers; the first is `loss`. A recipe names one of them
            in `evaluation.metric`.
        examples: what parts of the data are made of, as a plural for people.
        better: of metrics, whether `lower` or `higher` values are better.
        called: methods of the model, other than `forward`, that are called from outside.
        rounds: whether it exports in other dtypes than float32.
    """

    name: str
    unit: str
    metrics: tuple[str, ...] = ("loss",)
    examples: str = "documents"
    better: Mapping[str, Literal["lower", "higher"]] = BETTER
    called: tuple[str, ...] = ()
    rounds: bool = False

    # Planning

    @abstractmethod
    def look(self, recipe: Recipe) -> I:
        """Check paths, headers and the first of the data.

        Raises:
            InputError: with the recipe's field, or the file and line at fault.
        """

    def check_weights(self, inputs: I) -> None:
        """Refuse inputs that are enough for a plan, and not for training.

        Raises:
            InputError: with what is missing.
        """

    def data_files(self, recipe: Recipe, inputs: I) -> Iterable[Path]:
        """The files that the data is read from; none where it is made."""
        return ()

    def survey(self, recipe: Recipe, inputs: I) -> Mapping[str, Any]:
        """What is known of the data's `counts` before it is prepared, and whether it is `exact`.

        Empty where nothing is; such a task goes by `training.steps` alone.
        """
        return {}

    def check_layout(self, recipe: Recipe, inputs: I, layout: Layout) -> None:
        """Raise an InputError where the model does not run on ranks that share weights so."""

    def why_eager(self, recipe: Recipe, inputs: I) -> str | None:
        """Why blocks are not compiled where the recipe leaves it open; None: they may be."""
        return None

    def uncompressed(self, config: Any, inputs: I) -> Any:
        """The shape of the model before it was compressed."""
        return config

    def compressed(self, inputs: I, folder: Path) -> I:
        """The inputs whose model is the one that a compressor has left in this folder."""
        return replace(inputs, model_folder=folder)

    def reconfigured(self, inputs: I, recipe: Recipe) -> Any:
        """The shape of the model if the recipe were changed to this one."""
        return inputs.config

    def dtypes_of(self, inputs: I, recipe: Recipe) -> frozenset[str]:
        """What the inputs' `dtypes` would be then."""
        return inputs.dtypes

    def reshaped(self, config: Any, surgery: Surgery) -> Any:
        """The shape of the model after a surgery.

        Raises:
            InputError: no layer of it is of a form whose shape can change so.
        """
        raise InputError(
            "no layer of this task's model is of a form whose shape can change",
            field="surgery",
            value=", ".join(surgery.layers),
        )

    @abstractmethod
    def row(self, recipe: Recipe) -> ModelQuery:
        """The shape of one row; the planner sets how many there are and in how many bytes."""

    def ledger(
        self,
        config: Any,
        shape: ModelQuery,
        *,
        adapted: Any = None,
        recompute: bool = False,
        shares: Shares | None = None,
    ) -> Ledger | None:
        """What the model spends at the shape of a micro-batch, gradients that stay not counted.

        By arithmetic, which answers at once. None: nobody has written it down, and plans trace the
        model on `example`.

        Args:
            adapted: what adapters keep for the backward pass.
            shares: what a policy on saved activations leaves of them.
        """
        return None

    def example(self, config: Any, shape: ModelQuery) -> B:
        """A batch of this shape, with whatever values: what a trace runs.

        Raises:
            InputError: the task gives none.
        """
        raise InputError(
            f"the task {self.name!r} gives no example of a batch, so its model cannot be traced; "
            "define `example(config, shape)`",
            field="task.method",
            value=self.name,
        )

    def sampled(self, recipe: Recipe, config: Any, shape: ModelQuery) -> Ledger:
        """What is held in evaluations while `samples` are made, in addition to the model."""
        return Ledger()

    def slack(
        self, config: Any, shape: ModelQuery, *, adapted: Any = None, recompute: bool = False
    ) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        return 0

    def kept_by_block(
        self, config: Any, shape: ModelQuery, *, adapted: Any = None, recompute: bool = False
    ) -> Sequence[int]:
        """Bytes that each block keeps until its backward pass is over; nothing: it is unknown."""
        return ()

    def held(self, config: Any, item_bytes: int) -> Mapping[str, Tensors]:
        """Of each parameter, the tensors that represent it: how many rows, and bytes of one.

        Those that are no codes have `item_bytes` an element; a scalar is one row.
        """
        shapes = {name: tuple(shape) or (1,) for name, shape in config.parameter_shapes().items()}
        return {name: ((n[0], math.prod(n[1:]) * item_bytes),) for name, n in shapes.items()}

    @abstractmethod
    def largest_bytes(self, config: Any, shape: ModelQuery) -> int:
        """Bytes of the largest tensor of a step: a rehearsal keeps room for one more."""

    # Building

    @abstractmethod
    def model(self, config: Any) -> M:
        """The model; called within `on_meta`, so it has no memory."""

    @abstractmethod
    def fill(self, model: M, inputs: I, skip: Collection[str] = ()) -> None:
        """Read trained weights from `inputs.model_folder` into a model that has memory.

        Args:
            skip: parameters that are left as they are: their values come from elsewhere.
        """

    def weights(self, inputs: I) -> Callable[[str], Tensor] | None:
        """A reader of full-precision weights by the name of their layer, where there are any."""
        return None

    @abstractmethod
    def prepare(
        self, recipe: Recipe, inputs: I, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> Data[B]:
        """Make the data ready, with what is kept of it in the run folder; every rank calls this.

        Raises:
            InputError: what is wrong with the data, with file and line.
        """

    def held_out(self, recipe: Recipe) -> tuple[str, HoldsOut]:
        """The recipe's section that says what is held out: its name, and itself."""
        return "data", recipe.data

    def has_test(self, recipe: Recipe) -> bool:
        """Whether some of the data is held out for a test."""
        asked = self.held_out(recipe)[1]
        return asked.test_path is not None or asked.test_fraction > 0

    def digests(self, rows: Rows[B]) -> Iterator[bytes]:
        """One of each document or row of a part, alike where these are; none of a stream."""
        return iter(())

    def config(self, inputs: I, data: Data[B]) -> Any:
        """The model's configuration, now that the data is prepared."""
        return inputs.config

    @abstractmethod
    def trial(self, config: Any, batch: B) -> BlockSample[B]:
        """What compiling is tried on."""

    # In a step

    @abstractmethod
    def outputs(self, model: M, batch: B) -> Any:
        """What the model makes of a batch: what losses, teachers and second passes look at."""

    @abstractmethod
    def loss_of(self, outputs: Any, batch: B) -> Tensor:
        """The sum of the batch's losses: fp32, one element; `batch.count` belongs to it."""

    def loss_sum(self, model: M, batch: B) -> Tensor:
        """The same by a forward pass."""
        return self.loss_of(self.outputs(model, batch), batch)

    @torch.no_grad()
    def evaluate(self, model: M, batch: B) -> dict[str, float]:
        """The batch's sums, by name; always the same names."""
        return {"loss": float(self.loss_sum(model, batch))}

    def measures(self, sums: Mapping[str, float], count: int) -> dict[str, Any]:
        """The metrics, by the sums over all batches and ranks and the count that belongs to them.

        Their means, unless a task makes something else of them. What is no number, such as a
        figure for each class, is for reports.
        """
        return {name: total / max(count, 1) for name, total in sums.items()}

    # Afterwards

    def samples(
        self, recipe: Recipe, model: M, data: Data[B], ranks: Ranks
    ) -> list[dict[str, Any]]:
        """What the model makes now, as rows for people; every rank calls this."""
        return []

    @abstractmethod
    def export(
        self,
        model: M,
        data: Data[B],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the weights into `folder` as others read them.

        Every rank calls this, and gives its part of sharded weights; the one with `write` writes.
        `dtype` is what they are rounded to, where the task `rounds`.
        """

    def export_small(
        self,
        model: M,
        data: Data[B],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
        every: bool = False,
    ) -> bool:
        """Write the weights as small as they are held, where others' form is larger; if it is.

        Args:
            every: all layers as they are held, also those that are larger so.
        """
        return False
