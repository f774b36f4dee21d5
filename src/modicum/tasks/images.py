"""The task of telling images apart, with modicum's convolutional classifier."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.method import Info, Method, PositiveInt
from modicum.core.errors import InputError
from modicum.core.layers.saved_tensors import Shares
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import IGNORED
from modicum.data.images import DIGIT_CLASSES, DIGITS, SIDE, ImageBatch, Images, Textures, digits
from modicum.data.sampler import Sampler
from modicum.models import convnet
from modicum.models.convnet import ConvNet, ConvNetConfig
from modicum.models.convnet_ledger import ConvBlockBytes
from modicum.models.convnet_ledger import ledger as model_ledger
from modicum.recipe import Recipe
from modicum.tasks.base import BlockSample, Data, Inputs, Task
from modicum.tasks.metrics import class_metrics, class_sums, right_answers


class ImageClasses(Method):
    """Images of 32x32 pixels into classes, by a small convolutional network without batch norm.

    Args:
        data: `textures` are made as they are asked for; `digits` are scikit-learn's.
        classes: of textures; digits have ten.
        images: how many textures to train on; of digits, all that are not held out.
        held_out: how many to evaluate on.
        path: a folder of trained weights to start from, whose shape the model then has.
        widths: channels that each convolution makes.
        pool_every: after so many convolutions height and width are halved.
        norm: what follows each convolution.

    >>> task = ImageClasses(images=256, widths=(8, 8)).bind(None)
    >>> batch = task.rows(seed=0)[0].batch([0, 1])
    >>> model = convnet.create(task.look(Recipe()).config, seed=0)
    >>> sorted(task.measures(task.evaluate(model, batch), count=2))
    ['accuracy', 'by_class', 'loss', 'macro_f1']
    """

    info = Info(
        name="images",
        title="Classes of images, with a small convolutional network",
        room="tasks",
        paper="Very Deep Convolutional Networks for Large-Scale Image Recognition, arXiv 1409.1556",
        claim="a task for methods that work on convolutions",
        traits=("has_convolutions", "exact_resume", "compiles"),
    )

    data: Literal["textures", "digits"] = "textures"
    classes: Annotated[int, Field(ge=2)] = 10
    images: PositiveInt = 16384
    held_out: Annotated[int, Field(ge=0)] = 512
    path: str | None = None
    widths: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)] = (
        32,
        32,
        64,
        64,
        128,
        128,
    )
    pool_every: PositiveInt = 2
    norm: Literal["none", "group"] = "none"

    def bind(self, context: Any) -> ImageTask:  # type: ignore[override]
        """The task; it asks nothing of a context."""
        return ImageTask(self)


class ImageTask(Task[ConvNet, ImageBatch, Inputs]):
    """Cross-entropy of an image's class, in nats, and the share of right answers."""

    name = "images"
    unit = "images"
    metrics = ("loss", "accuracy", "macro_f1")

    def __init__(self, asked: ImageClasses) -> None:
        self.asked = asked

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, in the order of their labels."""
        count = DIGIT_CLASSES if self.asked.data == "digits" else self.asked.classes
        return tuple(map(str, range(count)))

    # Planning

    def look(self, recipe: Recipe) -> Inputs:
        """The shape of model and data; nothing is read but the configuration of trained weights.

        Raises:
            InputError: the folder is no such model, or of other images.
        """
        asked = self.asked
        classes = DIGIT_CLASSES if asked.data == "digits" else asked.classes
        channels = 1 if asked.data == "digits" else 3
        folder = None if asked.path is None else Path(asked.path)
        if folder is not None:
            inner = folder / "model"  # a run folder keeps its weights there
            folder = inner if (inner / convnet.CONFIG).is_file() else folder
            config = convnet.read_config(folder)
            if (config.classes, config.channels, config.size) != (classes, channels, SIDE):
                raise InputError(
                    f"this model is for {config.classes} classes of images of "
                    f"{config.channels}x{config.size}x{config.size}, and {asked.data} have "
                    f"{classes} of {channels}x{SIDE}x{SIDE}",
                    field="task.path",
                    value=asked.path,
                )
        else:
            try:
                config = ConvNetConfig(
                    classes, channels, SIDE, asked.widths, asked.pool_every, asked.norm
                )
            except InputError as error:
                raise error.within("task") from None
        count = "1797" if asked.data == "digits" else str(asked.images + asked.held_out)
        return Inputs(config, folder, f"{count} {asked.data} of {SIDE}x{SIDE} pixels")

    def survey(self, recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
        """How many images are trained."""
        asked = self.asked
        left = DIGITS - asked.held_out if asked.data == "digits" else asked.images
        return {"rows": max(left, 0), "exact": True}

    def row(self, recipe: Recipe) -> ModelQuery:
        """One image; the ledger counts images as sequences of one token."""
        return ModelQuery(1, 1)

    def ledger(
        self,
        config: ConvNetConfig,
        shape: ModelQuery,
        *,
        adapted: Any = None,
        recompute: bool = False,
        shares: Shares | None = None,
    ) -> Ledger:
        """What the classifier spends at the shape of a micro-batch.

        Args:
            shares: what a policy on saved tensors leaves of them.

        Raises:
            InputError: an adapter is asked for; the classifier is trained in full.
        """
        if adapted is not None:
            raise InputError(
                "images are trained without an adapter; leave it out", field="adapter.method"
            )
        return model_ledger(config, shape, recompute=recompute, shares=shares or Shares())

    def example(self, config: ConvNetConfig, shape: ModelQuery) -> ImageBatch:
        """Images of zeros."""
        images = torch.zeros(shape.positions, config.channels, config.size, config.size)
        return ImageBatch(images, torch.zeros(shape.positions, dtype=torch.int64))

    def largest_bytes(self, config: ConvNetConfig, shape: ModelQuery) -> int:
        """Of what a convolution makes."""
        return max(
            ConvBlockBytes(config, shape, number).makes for number in range(len(config.widths))
        )

    # Building

    def model(self, config: ConvNetConfig) -> ConvNet:
        """The classifier."""
        return ConvNet(config)

    def fill(self, model: ConvNet, inputs: Inputs, skip: Collection[str] = ()) -> None:
        """Read the folder's weights into a model that has memory."""
        assert inputs.model_folder is not None
        convnet.fill(model, inputs.model_folder, skip)

    def rows(self, seed: int) -> tuple[Images, Images | None]:
        """The images to train on and those to evaluate on, as functions of the seed.

        Raises:
            InputError: scikit-learn is asked for its digits and is not there, or all are held out.
        """
        asked = self.asked
        if asked.data == "digits":
            return digits(seed, asked.held_out)
        train = Textures(asked.images, asked.classes, seed)
        held = Textures(asked.held_out, asked.classes, seed, first=asked.images)
        return train, held if asked.held_out else None

    def prepare(
        self, recipe: Recipe, inputs: Inputs, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> Data[ImageBatch]:
        """Nothing is written: every rank makes its own images."""
        training = recipe.training
        try:
            train, validation = self.rows(training.seed)
        except InputError as error:
            raise error.within("task") from None
        sampler = Sampler(len(train), training.batch_size, training.seed)
        what = ("data", "classes", "images", "held_out")
        identity = {"images": self.asked.model_dump(include=set(what)), "seed": training.seed}
        return Data(train, validation, sampler, identity, counts={"rows": len(train)})

    def trial(self, config: ConvNetConfig, batch: ImageBatch) -> BlockSample[ImageBatch]:
        """A classifier of the first block alone."""
        return BlockSample(replace(config, widths=config.widths[:1]), batch)

    # In a step

    def outputs(self, model: ConvNet, batch: ImageBatch) -> Tensor:
        """Logits [images, classes]."""
        logits: Tensor = model(batch.images)
        return logits

    def loss_of(self, outputs: Tensor, batch: ImageBatch) -> Tensor:
        """The sum of -log p(label) over the trained labels: fp32, one element."""
        return F.cross_entropy(outputs.float(), batch.labels, ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def evaluate(self, model: ConvNet, batch: ImageBatch) -> dict[str, float]:
        """The sum of losses, how many answers are right, and counts of each class."""
        logits = self.outputs(model, batch)
        loss, right = float(self.loss_of(logits, batch)), right_answers(logits, batch.labels)
        return {"loss": loss, "accuracy": right, **class_sums(logits, batch.labels)}

    def measures(self, sums: Mapping[str, float], count: int) -> dict[str, Any]:
        """Means of loss and right answers, macro F1, and the accuracy by class."""
        means = super().measures({name: sums[name] for name in ("loss", "accuracy")}, count)
        return {**means, **class_metrics(sums, self.names)}

    # Afterwards

    def export(
        self, model: ConvNet, data: Data[ImageBatch], folder: Path, *, write: bool = True
    ) -> None:
        """Write config.json and model.safetensors, which `models.convnet.load` reads."""
        convnet.save(model, folder, write=write)
