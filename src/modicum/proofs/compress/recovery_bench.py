"""The testbed on which compressors are compared: a trained model, compressed, trained on as before.

Two tasks that every machine can make: the next character of Python's standard library, with the
built-in decoder, and scikit-learn's handwritten digits, with a perceptron of two hidden layers.
Each has rows to train on, rows to choose by and rows to report. All contenders get one calibration,
the same batches in recovery, and the same learning rate; so does the dense model, and what is
reported is how far above it they end. Nats a character, or a digit.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.compress.base import Compressor
from modicum.compress.low_rank_base import LowRankCompressor
from modicum.core.contracts.method import Info
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.layer_sites import Site
from modicum.core.random import derive_seed
from modicum.models import create
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits
from modicum.proofs.bench.training import train
from modicum.proofs.optim.text_bench import CLIP, SCHEDULE, Text, TextSize

LabelledBatch = tuple[Tensor, Tensor]


class PlainSVD(LowRankCompressor):
    """The truncated SVD of the weight itself: the baseline."""

    info = Info("plain_svd", "Truncated SVD", "compress", "", "")

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("fisher",)

    def metric(self, layer: Site, calibration: Calibration) -> None:
        return None


class OutputSVD(LowRankCompressor):
    """LoRD's projection on the principal directions of a layer's outputs: it needs no gradients.

    Source: Kaushal et al., arXiv 2309.14021.
    """

    info = Info("output_svd", "SVD of a layer's outputs", "compress", "", "")

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("moment",)

    def metric(self, layer: Site, calibration: Calibration) -> Tensor:
        moment = calibration.mean("moment", layer.name)
        return moment + 1e-6 * moment.diagonal().mean() * torch.eye(len(moment)).to(moment)


class RecoveryTask(ABC):
    """A trained model, and what it was trained on.

    Args:
        rate: the learning rate of recovery, warmed up and brought down as in training.
        steps: of recovery.
    """

    name: str
    rate: float
    steps: int

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The trained model; contenders take copies."""

    @abstractmethod
    def train_batch(self, name: str) -> LabelledBatch:
        """Inputs and labels to train on, as a function of the name."""

    @abstractmethod
    def held_out(self, part: str) -> Iterator[LabelledBatch]:
        """Inputs and labels of the part `validation` or `test`."""

    @cached_property
    def calibration(self) -> Calibration:
        """What all contenders ask for, over 16 batches."""
        both = _Both(examples=10**6)
        batches = [self.train_batch(f"calibration {number}") for number in range(16)]
        return both.calibrate(self.model, batches, lambda model, batch: loss(model, batch, "sum"))

    def train(self, model: nn.Module, name: str, steps: int, rate: float) -> None:
        """AdamW with a warm-up, a cosine and clipping."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)

        def loss_of(step: int) -> Tensor:
            return loss(model, self.train_batch(f"{name} {step}"))

        train([optimizer], loss_of, steps, schedule=SCHEDULE, clip=CLIP)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> float:
        """The mean loss on a part that is held out."""
        batches = list(self.held_out(part))
        total = sum(loss(model, batch, "sum").item() for batch in batches)
        return total / sum(labels.numel() for _, labels in batches)


class _Both(PlainSVD):
    """Asks for all that any contender does."""

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("fisher", "moment")


class Code(RecoveryTask):
    """The next character of code; one decoder for all seeds, whose recovery they shuffle.

    Args:
        rows: of characters that are held out, in either part.
    """

    name = "code"

    def __init__(
        self, size: TextSize, steps: int, rows: int, trained: Code | None = None, seed: int = 0
    ) -> None:
        self.text, self.steps, self.rate, self.seed = Text(size), steps, 1e-3, seed
        self.rows, self._trained = rows, trained

    @cached_property
    def model(self) -> nn.Module:
        """The decoder after `size.steps` steps."""
        if self._trained is not None:
            return self._trained.model
        model = create(self.text.size.model, seed=0)
        self.train(model, "pretraining", self.text.size.steps, 3e-3)
        return model

    @cached_property
    def calibration(self) -> Calibration:
        """One for all seeds, as the decoder is one."""
        return super().calibration if self._trained is None else self._trained.calibration

    def train_batch(self, name: str) -> LabelledBatch:
        """Rows of characters, and the characters that follow them."""
        rows = self.text.batch(f"{self.seed} {name}", self.text.size.rows, self.text.halves[0])
        return rows[:, :-1], rows[:, 1:]

    def held_out(self, part: str) -> Iterator[LabelledBatch]:
        """Rows of the first or the second half of the text that is held out."""
        text = self.text.halves[1]
        half = len(text) // 2
        text = text[:half] if part == "validation" else text[half:]
        for rows in self.text.batch(part, self.rows, text).split(64):
            yield rows[:, :-1], rows[:, 1:]


class Digits(RecoveryTask):
    """Handwritten digits; each seed has a split, a perceptron 64-256-256-10 and batches of its own.

    Splits have 1,000 images to train on, 400 to choose by and 397 to report.
    """

    name = "digits"

    def __init__(self, run: ProofRun, steps: int, seed: int) -> None:
        self.steps, self.rate, self.seed = steps, 3e-4, seed
        images, labels = digits(run)
        order = torch.randperm(len(labels), generator=_generator("split", seed))
        self.images, self.labels = images.flatten(1)[order], labels[order]

    @cached_property
    def model(self) -> nn.Module:
        """The perceptron after 400 steps."""
        sizes = (64, 256, 256, 10)
        generator = _generator("weights", self.seed)
        layers: list[nn.Module] = []
        for ins, outs in pairwise(sizes):
            linear = nn.Linear(ins, outs)
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.uniform_(-(ins**-0.5), ins**-0.5, generator=generator)
            layers += [linear, nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
        self.train(model, "training", 400, 1e-3)
        return model

    def train_batch(self, name: str) -> LabelledBatch:
        """64 images of the first 1,000."""
        places = torch.randint(1000, (64,), generator=_generator(name, self.seed))
        return self.images[places], self.labels[places]

    def held_out(self, part: str) -> Iterator[LabelledBatch]:
        """All images of the part."""
        places = slice(1000, 1400) if part == "validation" else slice(1400, None)
        yield self.images[places], self.labels[places]


@dataclass(frozen=True)
class Recovered:
    """Losses of one contender on one task: on `test` before recovery, and on both parts after."""

    before: float
    validation: float
    test: float


class RecoveryBench:
    """Contenders on several tasks of one kind, one a seed; what was run once is known."""

    def __init__(self, run: ProofRun, tasks: list[RecoveryTask]) -> None:
        self.run, self.tasks = run, tasks
        self._known: dict[tuple[Compressor | None, int], Recovered] = {}

    def recovered(self, value: Compressor | None) -> list[Recovered]:
        """What became of each task's model under this compressor; None leaves it dense."""
        for index, task in enumerate(self.tasks):
            if (value, index) not in self._known:
                name = "the dense model" if value is None else value.info.name
                self.run.progress(f"{task.name}: {name}")
                self._known[value, index] = _recover(task, value)
        return [self._known[value, index] for index in range(len(self.tasks))]

    def best(self, values: list[Compressor]) -> list[Recovered]:
        """For each task, what did best on its validation rows."""
        arms = [self.recovered(value) for value in values]
        return [min(each, key=lambda arm: arm.validation) for each in zip(*arms, strict=True)]

    def rise(self, arms: list[Recovered]) -> float:
        """The mean test loss above the dense model's that was trained on as much."""
        dense = self.recovered(None)
        return mean(arm.test for arm in arms) - mean(arm.test for arm in dense)


def _recover(task: RecoveryTask, value: Compressor | None) -> Recovered:
    model = copy.deepcopy(task.model)
    if value is not None:
        value.fit(model, task.calibration)
    before = task.score(model, "test")
    task.train(model, "recovery", task.steps, task.rate)
    return Recovered(before, task.score(model, "validation"), task.score(model, "test"))


def loss(model: nn.Module, batch: LabelledBatch, reduction: str = "mean") -> Tensor:
    """Cross-entropy of labels [...] under the model's logits [..., classes]."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten(), reduction=reduction)


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, name))
