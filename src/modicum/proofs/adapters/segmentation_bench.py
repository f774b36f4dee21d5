"""A toy of few-shot segmentation: a network that finds blobs learns to find thin curves.

A convolutional encoder and decoder, 64 x 64 pixels to 64 x 64 logits, learns from 400 drawn
images to segment ellipses. Then 20 images with thin curved vessels are shown, drawn splines in
weaker contrast, and a contender adapts the convolutions, next to which the head of 1 x 1 is always
trained. The loss is cross-entropy and soft Dice; a run gives the mean Dice over 100 images that
nobody has seen.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.parameters import count, optimizer_groups
from modicum.core.known_outcomes import described
from modicum.core.random import derive_seed
from modicum.proofs.adapters.permutation_bench import FullTuning
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.bench.training import RateSchedule, train

PIXELS, CHANNELS, NOISE = 64, 32, 0.3
ELLIPSES, VESSELS, TEST = 400, 20, 100
PRETRAINING_STEPS, PRETRAINING_RATE, BATCH, STEPS = 300, 3e-3, 10, 100
DECAY, SCHEDULE = 1e-2, RateSchedule(10)
CONVOLUTIONS = ("shrink1", "shrink2", "middle", "grow1", "grow2")
HEAD = "head"

SegmentingContender = Adapter | FullTuning


@dataclass(frozen=True)
class Segmented:
    """What an adaptation comes to.

    Args:
        dice: the mean over the test images.
        trained: numbers, the head's apart.
    """

    dice: float
    trained: int

    @property
    def lost(self) -> float:
        """What of a Dice of 1 is missing."""
        return 1 - self.dice


class SegmentationBench:
    """The drawn images, the base model, and adaptations of it.

    Args:
        run: the proof's run.
    """

    def __init__(self, run: ProofRun) -> None:
        self.run = run
        self.vessels = drawn("vessels", VESSELS, "training")
        self.test = drawn("vessels", TEST, "test")
        self.sweep: Sweep[SegmentingContender, Segmented] = Sweep(
            run,
            self.adapt,
            lambda found: found.lost,
            shared={"bench": "segmentation", "steps": STEPS},
            kind=Segmented,
        )

    @cached_property
    def base(self) -> nn.Sequential:
        """The model that segments ellipses."""
        self.run.progress("pretraining on ellipses")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = network()
        loss = _loss(model, drawn("ellipses", ELLIPSES, "pretraining"), "pretraining", 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
        train([optimizer], loss, PRETRAINING_STEPS, schedule=SCHEDULE)
        return model

    def adapt(
        self, contender: SegmentingContender, learning_rate: float, seed: int = 0
    ) -> Segmented:
        """Adapt a copy of the base model to vessels; AdamW with warm-up and a linear fall."""
        model, hooks = copy.deepcopy(self.base), RunHooks()
        if isinstance(contender, Adapter):
            contender = contender.with_fields(targets=CONVOLUTIONS, also=(HEAD,))
            attached = contender.attach(model, seed=seed)
            hooks.add("adapter", contender.run_hook(attached))
        head = sum(p.numel() for p in self.base.get_submodule(HEAD).parameters())
        trained = count(model)[1] - head
        groups = optimizer_groups(model, learning_rate=learning_rate, weight_decay=DECAY)
        loss = _loss(model, self.vessels, "adapting", seed)
        train([torch.optim.AdamW(groups)], loss, STEPS, schedule=SCHEDULE, hooks=hooks)
        return Segmented(dice(model.eval(), *self.test), trained)

    def best(
        self, contender: SegmentingContender, rates: Sequence[float], *, baseline: bool = False
    ) -> Swept[Segmented]:
        """At the learning rate whose mean Dice over the seeds is highest.

        Args:
            baseline: whether other proofs train it too.
        """
        return self.sweep.best(described(contender), contender, rates, baseline=baseline)


def network() -> nn.Sequential:
    """64 x 64 to 16 x 16 and back, logits [n, 1, 64, 64] of images [n, 1, 64, 64]."""
    narrow, wide = CHANNELS // 2, CHANNELS
    return nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(1, narrow, 3, padding=1),
            bend0=nn.GELU(),
            shrink1=nn.Conv2d(narrow, wide, 3, stride=2, padding=1),
            bend1=nn.GELU(),
            shrink2=nn.Conv2d(wide, wide, 3, stride=2, padding=1),
            bend2=nn.GELU(),
            middle=nn.Conv2d(wide, wide, 3, padding=1),
            bend3=nn.GELU(),
            grow1=nn.Conv2d(wide, 4 * wide, 3, padding=1),
            wider1=nn.PixelShuffle(2),
            bend4=nn.GELU(),
            grow2=nn.Conv2d(wide, 4 * narrow, 3, padding=1),
            wider2=nn.PixelShuffle(2),
            bend5=nn.GELU(),
            head=nn.Conv2d(narrow, 1, 1),
        )
    )


def drawn(what: Literal["ellipses", "vessels"], images: int, part: str) -> tuple[Tensor, Tensor]:
    """Images and their masks, both [images, 1, 64, 64]."""
    generator = _generator(f"{what} for {part}", 0)
    draw = _ellipse if what == "ellipses" else _vessels
    masks = torch.stack([draw(generator) for _ in range(images)])[:, None]
    contrast = 1.0 if what == "ellipses" else 0.7
    noise = torch.randn(masks.shape, generator=generator)
    return contrast * masks + NOISE * noise, masks


@torch.no_grad()
def dice(model: nn.Module, images: Tensor, masks: Tensor) -> float:
    """2 |found and there| / (|found| + |there|), the mean over images."""
    found = (model(images) > 0).float()
    both, sizes = ((found * masks).sum((1, 2, 3)), (found + masks).sum((1, 2, 3)))
    return float((2 * both / sizes).mean())


def _pixels() -> Tensor:
    """Coordinates of pixels [64, 64, 2], from -1 to 1."""
    line = torch.linspace(-1, 1, PIXELS)
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)


def _ellipse(generator: torch.Generator) -> Tensor:
    """Ones where the ellipse is, [64, 64]."""
    x, y, long, short, turn = torch.rand(5, generator=generator).tolist()
    away = _pixels() - torch.tensor([x - 0.5, y - 0.5])
    sine, cosine = math.sin(math.pi * turn), math.cos(math.pi * turn)
    along = away @ torch.tensor([[cosine, -sine], [sine, cosine]])
    return (
        (along / torch.tensor([0.25 + 0.4 * long, 0.15 + 0.2 * short])).norm(dim=-1).lt(1).float()
    )


def _vessels(generator: torch.Generator) -> Tensor:
    """Ones along two cubic splines across the image, a little more than two pixels wide."""
    mask = torch.zeros(PIXELS, PIXELS)
    place = torch.linspace(0, 1, 100)[:, None]
    for _ in range(2):
        points = 1.6 * torch.rand(4, 2, generator=generator) - 0.8
        flip = bool(torch.rand(1, generator=generator) < 0.5)
        points[:, int(flip)] = torch.linspace(-0.9, 0.9, 4)
        weights = [math.comb(3, i) * place**i * (1 - place) ** (3 - i) for i in range(4)]
        curve = sum(weight * point for weight, point in zip(weights, points, strict=True))
        assert isinstance(curve, Tensor)
        near = torch.cdist(_pixels().flatten(0, 1), curve).amin(1).view(PIXELS, PIXELS)
        mask = torch.maximum(mask, (near < 2.2 / PIXELS).float())
    return mask


def _loss(
    model: nn.Module, data: tuple[Tensor, Tensor], name: str, seed: int
) -> Callable[[int], Tensor]:
    """Cross-entropy and soft Dice of batches at random."""
    generator = _generator(name, seed)

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(data[0]), (BATCH,), generator=generator)
        logits, masks = model(data[0][rows]), data[1][rows]
        chance = logits.sigmoid()
        both, sizes = (chance * masks).sum((1, 2, 3)), (chance + masks).sum((1, 2, 3))
        soft = (2 * both + 1) / (sizes + 1)
        return F.binary_cross_entropy_with_logits(logits, masks) + (1 - soft).mean()

    return loss


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, f"segmentation {name}"))
