"""Where policies on activations are compared: a classifier of textures.

Every arm has the same model, images, order, optimizer and schedule, by the seed. Bytes are those
that are held between forward and backward pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.layers.saved_tensors import Need
from modicum.data.images import Images, Textures, digits
from modicum.data.sampler import Sampler
from modicum.memory.activations import Activations
from modicum.memory.base import ActivationPolicy
from modicum.models.convnet import ConvNet, ConvNetConfig, create
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.training import RateSchedule, train

_HELD_OUT = 10**6  # numbers of textures that nobody trains on begin here


@dataclass(frozen=True)
class TextureSize:
    """How large an experiment is.

    Args:
        images, held_out: to train on and to evaluate on.
        check_every: updates between two comparisons of measured with predicted noise.
    """

    images: int
    held_out: int
    config: ConvNetConfig
    batch_size: int
    steps: int
    seeds: tuple[int, ...]
    learning_rate: float = 2e-3
    warmup: int = 10
    check_every: int = 0
    data: Literal["textures", "digits"] = "textures"


@dataclass(frozen=True)
class ArmOutcome:
    """What an arm came to.

    Args:
        accuracy: on held-out images, in percent.
        held: bytes of convolutions' inputs and ReLUs' outputs, of a typical update (the median).
        most: the same of the update that holds most.
        plain: what they are without a policy.
        all_held, all_plain: of all saved tensors, those of where maxima were among them.
        seconds: an update, the median.
        ratios: measured over predicted noise, by convolution.
        seeds: what the arm came to from each seed, where this is a mean.
    """

    accuracy: float
    held: float
    most: float
    plain: float
    all_held: float
    all_plain: float
    seconds: float
    ratios: dict[str, list[float]] = field(default_factory=dict)
    seeds: tuple[ArmOutcome, ...] = ()

    @property
    def as_plain(self) -> ArmOutcome:
        """The same with what autograd alone would hold, which has no masks of one bit."""
        seeds = tuple(each.as_plain for each in self.seeds)
        plain = replace(self, held=self.plain, most=self.plain, all_held=self.all_plain)
        return replace(plain, seeds=seeds)

    def each(self, name: str) -> list[float]:
        """One of the numbers, of each seed."""
        return [getattr(outcome, name) for outcome in self.seeds or (self,)]

    @classmethod
    def mean(cls, outcomes: Sequence[ArmOutcome]) -> ArmOutcome:
        """The means of all numbers, and all ratios together."""
        ratios: dict[str, list[float]] = {}
        for outcome in outcomes:
            for layer, found in outcome.ratios.items():
                ratios.setdefault(layer, []).extend(found)
        names = [each.name for each in fields(cls) if each.name not in ("ratios", "seeds")]
        means = {n: statistics.mean(getattr(each, n) for each in outcomes) for n in names}
        return cls(**means, ratios=ratios, seeds=tuple(outcomes))


class TextureBench:
    """Trains the classifier under one policy after another."""

    __test__ = False  # for pytest: no test case

    def __init__(self, run: ProofRun, size: TextureSize) -> None:
        self.run, self.size = run, size
        run.seeds = size.seeds

    def mean(self, policy: ActivationPolicy, name: str) -> ArmOutcome:
        """What the policy comes to on average over the seeds."""
        outcomes = []
        for seed in self.size.seeds:
            self.run.progress(f"training: {name}")
            outcomes.append(self.outcome(policy, seed))
        return ArmOutcome.mean(outcomes)

    def outcome(self, policy: ActivationPolicy, seed: int) -> ArmOutcome:
        """Train from the seed and evaluate."""
        size = self.size
        train_images, held_out = self._images(seed)
        model = create(size.config, seed)
        torch.manual_seed(seed)
        runtime = policy.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
        sampler = Sampler(len(train_images), size.batch_size, seed)
        bytes_: list[tuple[int, int, int, int]] = []
        ratios: dict[str, list[float]] = {}
        batch = train_images.batch(sampler.indices(0))
        by_need: dict[Need, tuple[int, int]] = {}

        def loss_of(step: int) -> Tensor:
            nonlocal by_need
            runtime.before_update()
            with runtime.context():
                loss = F.cross_entropy(model(batch.images), batch.labels)
            by_need = runtime.saved.by_need()
            return loss

        def next_batch(step: int) -> None:
            nonlocal batch
            batch = train_images.batch(sampler.indices(step))
            checks = size.check_every and step and step % size.check_every == 0
            if checks and any(layer.bound for layer in runtime.layers):
                for name, ratio in noise_ratios(model, runtime, batch.images, batch.labels).items():
                    ratios.setdefault(name, []).append(ratio)

        def after(step: int) -> None:
            runtime.after_step()
            bytes_.append(_held_and_plain(by_need))
            if step + 1 < size.steps:
                next_batch(step + 1)

        seconds = train(
            [optimizer],
            loss_of,
            size.steps,
            schedule=RateSchedule(size.warmup, "cosine"),
            before_update=lambda step: runtime.observe(optimizer),
            after_update=after,
        )
        held, plain, all_held, all_plain = zip(*bytes_, strict=True)
        middle = statistics.median
        return ArmOutcome(
            accuracy=_accuracy(model, held_out),
            held=middle(held),
            most=max(held),
            plain=middle(plain),
            all_held=middle(all_held),
            all_plain=middle(all_plain),
            seconds=middle(seconds),
            ratios=ratios,
        )

    def _images(self, seed: int) -> tuple[Images, Images]:
        size, classes = self.size, self.size.config.classes
        if size.data == "digits":
            self.run.library("sklearn", "proofs")
            train, some, _ = digits(seed, size.held_out)
            assert some is not None
            return train, some
        held = Textures(size.held_out, classes, seed, first=_HELD_OUT)
        return Textures(size.images, classes, seed), held


def _held_and_plain(by_need: dict[Need, tuple[int, int]]) -> tuple[int, int, int, int]:
    """Bytes held and plain: of what the policy is about, and of everything."""
    about = [by_need[need] for need in (Need.SHAPE, Need.SIGNS, Need.VALUES)]
    held, plain = (sum(each[place] for each in about) for place in range(2))
    exact = by_need[Need.EXACT][1]
    return held, plain, held + exact, plain + exact


def noise_ratios(
    model: ConvNet, runtime: Activations, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Root mean square of the noise in each convolution's weight gradient over the law's.

    The law has the bound that is in force, and the batch's own gradients and zeros.
    """
    layers = [layer for layer in runtime.layers if layer.bound]
    weights = [layer.module.weight for layer in layers]
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, inputs: Tensor, output: Tensor) -> None:
        seen[name] = inputs, output

    hooks = [
        layer.module.register_forward_hook(
            lambda module, inputs, output, name=layer.name: note(name, inputs[0], output)
        )
        for layer in layers
    ]
    loss = F.cross_entropy(model(images), labels)
    for hook in hooks:
        hook.remove()
    outputs = [seen[layer.name][1] for layer in layers]
    found = torch.autograd.grad(loss, [*weights, *outputs])
    exact, gradients = found[: len(layers)], found[len(layers) :]
    with runtime.context():
        loss = F.cross_entropy(model(images), labels)
    noisy = torch.autograd.grad(loss, weights)
    ratios = {}
    for layer, one, other, gradient in zip(layers, exact, noisy, gradients, strict=True):
        share = float((seen[layer.name][0] != 0).float().mean())
        squares = float(gradient.square().sum()) / gradient.shape[1]
        predicted = layer.bound / math.sqrt(3) * math.sqrt(share * squares)
        measured = float((other - one).square().mean().sqrt())
        if predicted:
            ratios[layer.name] = measured / predicted
    return ratios


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    model.eval()
    right = 0
    for start in range(0, len(images), 256):
        batch = images.batch(range(start, min(start + 256, len(images))))
        right += int((model(batch.images).argmax(1) == batch.labels).sum())
    return 100 * right / len(images)
