"""The task of telling images apart, with modicum's convolutional classifier."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.method import Info, Method, PositiveInt, Probability
from modicum.core.errors import InputError
from modicum.core.files import read_text, write_text
from modicum.core.layers.saved_tensors import Shares
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import IGNORED
from modicum.data.images import ImageBatch, Images
from modicum.data.rows import Rows
from modicum.data.sampler import Sampler
from modicum.models import convnet
from modicum.models.convnet import ConvNet, ConvNetConfig
from modicum.models.convnet_ledger import ConvBlockBytes
from modicum.models.convnet_ledger import ledger as model_ledger
from modicum.recipe import Recipe
from modicum.tasks.base import BlockSample, Data, Inputs, Task
from modicum.tasks.image_origins import MadeImages, OwnImages, origin_of, within_task
from modicum.tasks.metrics import class_metrics, class_sums, right_answers
from modicum.tasks.parts import HoldsOut

_DIGESTED = 64  # images at a time


class ImageClasses(Method):
    """Images into classes, by a small convolutional network without batch norm.

    Args:
        data: `textures` are made as they are asked for; `digits` are scikit-learn's; both have
            32x32 pixels.
        data_path: your own instead, in PNG and JPEG: a folder with one folder a class, or with
            `train` and `validation` or `test` of these; or a table with the columns file and
            label.
        validation_path: of your own images, those to evaluate on.
        validation_fraction: without such, this part of each class is held out.
        test_path: of your own images, those of the test, which no choice may depend on.
        test_fraction: without such, this part of each class, the same with any seed; the fraction
            of the validation is then one of the rest.
        size: pixels of height and width that your own images are made to have.
        fit: how. crop: the shorter side is made to fit and the middle taken. stretch: both sides
            are made to fit. pad: the longer side is, and what is missing is black.
        colour: rgb, or grey for one channel.
        classes: of textures; digits have ten.
        images: how many textures to train on; of digits, all that are not held out.
        held_out: how many textures or digits to evaluate on.
        tested: how many textures or digits are the test.
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
    data_path: str | None = None
    validation_path: str | None = None
    validation_fraction: Probability = 0.1
    test_path: str | None = None
    test_fraction: Probability = 0.0
    size: PositiveInt = 32
    fit: Literal["crop", "stretch", "pad"] = "crop"
    colour: Literal["rgb", "grey"] = "rgb"
    classes: Annotated[int, Field(ge=2)] = 10
    images: PositiveInt = 16384
    held_out: Annotated[int, Field(ge=0)] = 512
    tested: Annotated[int, Field(ge=0)] = 0
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
    unit = examples = "images"
    metrics = ("loss", "accuracy", "macro_f1")

    def __init__(self, asked: ImageClasses) -> None:
        self.asked = asked
        self.origin = origin_of(asked)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, in the order of their labels."""
        return self.origin.names

    # Planning

    def data_files(self, recipe: Recipe, inputs: Inputs) -> Iterable[Path]:
        """The images; none where they are drawn."""
        if not isinstance(self.origin, OwnImages):
            return ()
        found = self.origin.files(recipe.training.seed)
        return [file.path for part in found.parts.values() for file in part]

    def look(self, recipe: Recipe) -> Inputs:
        """The shape of model and data; files are listed, and no image but the first is read.

        Raises:
            InputError: the folder is no such model, or of other images; or images have no class.
        """
        asked, origin = self.asked, self.origin
        with within_task():
            origin.check(recipe.training.seed)
            classes, channels, size = len(self.names), origin.channels, origin.size
        folder = None if asked.path is None else Path(asked.path)
        if folder is not None:
            inner = folder / "model"  # a run folder keeps its weights there
            folder = inner if (inner / convnet.CONFIG).is_file() else folder
            config = convnet.read_config(folder)
            if (config.classes, config.channels, config.size) != (classes, channels, size):
                raise InputError(
                    f"this model is for {config.classes} classes of images of "
                    f"{config.channels}x{config.size}x{config.size}, and {origin.title} have "
                    f"{classes} of {channels}x{size}x{size}",
                    field="task.path",
                    value=asked.path,
                )
        else:
            with within_task():
                config = ConvNetConfig(
                    classes, channels, size, asked.widths, asked.pool_every, asked.norm
                )
        return Inputs(config, folder, origin.described(recipe.training.seed))

    def survey(self, recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
        """How many images are trained, and of your own how many of each class."""
        return {**self.origin.counts(recipe.training.seed), "exact": True}

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
    ) -> Ledger | None:
        """What the classifier spends at the shape of a micro-batch; None: with adapters.

        Args:
            shares: what a policy on saved tensors leaves of them.
        """
        if adapted is not None:
            return None
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

    def held_out(self, recipe: Recipe) -> tuple[str, HoldsOut]:
        """The task's own fields."""
        return "task", self.asked

    def has_test(self, recipe: Recipe) -> bool:
        """Whether images are held out for a test, your own ones or made ones."""
        if isinstance(self.origin, OwnImages):  # a folder `test` may be among them
            return bool(self.origin.files(recipe.training.seed).test)
        return self.asked.tested > 0

    def digests(self, rows: Rows[ImageBatch]) -> Iterator[bytes]:
        """One of each image's pixels, as the model sees them."""
        for first in range(0, len(rows), _DIGESTED):
            some = range(first, min(first + _DIGESTED, len(rows)))
            for image in rows.batch(some).images:
                yield hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest()

    # Building

    def model(self, config: ConvNetConfig) -> ConvNet:
        """The classifier."""
        return ConvNet(config)

    def fill(self, model: ConvNet, inputs: Inputs, skip: Collection[str] = ()) -> None:
        """Read the folder's weights into a model that has memory."""
        assert inputs.model_folder is not None
        convnet.fill(model, inputs.model_folder, skip)

    def rows(self, seed: int) -> tuple[Images, Images | None, Images | None]:
        """The made images to train on, to evaluate on and to test on, by the seed.

        Raises:
            InputError: scikit-learn is asked for its digits and is not there, or all are held out.
        """
        assert isinstance(self.origin, MadeImages)
        return self.origin.rows(seed)

    def prepare(
        self, recipe: Recipe, inputs: Inputs, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> Data[ImageBatch]:
        """Your own images become arrays in the run folder, once; others are made by every rank."""
        training = recipe.training
        with within_task():
            found = self.origin.prepared(training.seed, folder, progress, ranks)
        sampler = Sampler(len(found.train), training.batch_size, training.seed)
        counts = self.origin.counts(training.seed)
        return Data(
            found.train, found.validation, sampler, found.identity, found.files, counts, found.test
        )

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
        self,
        model: ConvNet,
        data: Data[ImageBatch],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write config.json and model.safetensors, which `models.convnet.load` reads.

        Of your own images `images.json` stands next to them: classes, and how images become arrays.
        """
        convnet.save(model, folder, write=write)
        for file in data.files if write else ():
            write_text(folder / file.name, read_text(file))
