"""The proof of DistZO2: fine-tuning with the memory of inference, of three blocks when streamed.

A network that knows scikit-learn's digits sees them moved by one column. What training all weights
by Adam gains in held-out accuracy is the measure, of which 80 % must come from losses alone, in
5,000 pairs of forward passes; the quick run has fewer, and a lower bar. Bytes are counted as
PyTorch allocates them, in a decoder. The best simple alternative at the memory of inference trains
the last layer alone, which needs no activations but its inputs.

Reduced: 2,368 weights instead of 175 billion, and no accelerator: whether streaming hides the
copies is not shown here.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.machine.memory import TensorMeter
from modicum.core.random import derive_seed, sample
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.optim.streamed_two_point import StreamedTwoPoint
from modicum.optim.two_point import TwoPoint
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits

BATCH, TRAINED, RATE = 128, 1400, 6e-3
GAIN, QUICK_GAIN, PAIRS, QUICK_PAIRS = 0.8, 0.6, 5000, 1200
PEAK, RESIDENT = 1.02, 3
DECODER = ModelConfig(
    vocabulary_size=256, width=64, layers=6, heads=2, mlp_width=160, context=64
)  # fmt: skip
# Large enough that the table of normal numbers, 262 kB whatever the model, is next to nothing.
WIDE = ModelConfig(
    vocabulary_size=256, width=256, layers=6, heads=4, mlp_width=640, context=64
)  # fmt: skip


def prove(run: ProofRun) -> None:
    """Memory, blocks on the device, and what is learned from losses."""
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    as_inference(run)
    three_blocks(run)
    as_far_as_gradients(run)


def as_inference(run: ProofRun) -> None:
    """The peak of an update over that of an evaluation."""
    model, rows = create(WIDE, seed=0), _rows()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    snapshot = run.contender(False, null=True, null_is="a copy of the weights in each update")
    training = TwoPoint(model.named_parameters(), seed=0, snapshot=snapshot)
    with torch.no_grad():
        evaluation = _peak(held, lambda: _loss(model, rows))
        update = _peak(held, lambda: training.update(1, 1e-3, lambda: _loss(model, rows)))
    figure = run.figure("peak bytes", method=update, baseline=evaluation, claimed="of inference")
    run.at_most("peak of an update, of an evaluation's", figure.ratio, PEAK)


def three_blocks(run: ProofRun) -> None:
    """Blocks on the device at once, and the weights against those that never moved."""
    depth = run.contender(1, null=3, null_is="three blocks on their way up")
    resident, moved, rows = create(DECODER, seed=0), create(DECODER, seed=0), _rows()
    plain = TwoPoint(resident.named_parameters(), seed=0, snapshot=True)
    training = StreamedTwoPoint(dict(moved.named_parameters()), model=moved, seed=0, depth=depth)
    with torch.no_grad():
        for step in (1, 2, 3):
            plain.update(step, 1e-3, lambda: _loss(resident, rows))
            training.update(step, 1e-3, lambda: _loss(moved, rows))
    training.close()
    most = training.streamer.most_resident
    run.figure("blocks on the device", method=most, baseline=len(training.streamer))
    run.at_most("blocks on the device at once", most, RESIDENT)
    pairs = zip(resident.parameters(), moved.parameters(), strict=True)
    off = sum(int((one != other).sum()) for one, other in pairs)
    run.at_most("weights that streaming makes others", off, 0, part="check")


def as_far_as_gradients(run: ProofRun) -> None:
    """The share of full tuning's gain, and the loss against the last layer's training."""
    apart = run.contender(0, null=1 << 20, null_is="updates along other directions than tried")
    pairs, bar = (PAIRS, GAIN) if run.full else (QUICK_PAIRS, QUICK_GAIN)
    gains, ratios = [], []
    for seed in run.seeds:
        task = _Moved(run, seed)
        run.progress(f"losses alone, seed {seed}")
        tuned, full, last = copy.deepcopy(task.known), task.adam(), task.adam(last=True)
        task.by_losses(tuned, pairs, apart)
        before, best = task.accuracy(task.known), task.accuracy(full)
        gains.append((task.accuracy(tuned) - before) / (best - before))
        ratios.append(task.held_out(tuned) / task.held_out(last))
    share = statistics.fmean(gains)
    run.figure("gain in held-out accuracy", method=share, baseline=1.0, claimed="80 % or more")
    run.at_least("share of full tuning's gain, by losses alone", share, bar, seeds=gains)
    run.against("the last layer alone, by Adam", "held-out loss", ratios)


class _Moved:
    """Digits that are moved by a column, and a network that knows them where they were."""

    def __init__(self, run: ProofRun, seed: int) -> None:
        images, labels = digits(run)
        kept = sample(len(images), TRAINED, seed=seed, name="trained")
        self.seed, self.training = seed, torch.zeros(len(images), dtype=torch.bool)
        self.training[kept] = True
        self.images, self.labels = images, labels
        torch.manual_seed(derive_seed(seed, "network"))
        self.known = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False)
        )
        self._adam(self.known, list(self.known.parameters()), 3e-3)
        self.images = images.roll(1, -1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a batch that the step decides."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "batch", step))
        rows = torch.randint(TRAINED, (BATCH,), generator=generator)
        return self.images[self.training][rows], self.labels[self.training][rows]

    def adam(self, *, last: bool = False) -> nn.Sequential:
        """The network tuned by gradients, in full or its last layer, each at a good rate."""
        model = copy.deepcopy(self.known)
        chosen = model[-1] if last else model
        self._adam(model, list(chosen.parameters()), 1e-2 if last else 3e-3)
        return model

    def _adam(self, model: nn.Module, parameters: list[nn.Parameter], rate: float) -> None:
        optimizer = torch.optim.Adam(parameters, rate)
        for step in range(600):
            images, labels = self.batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    @torch.no_grad()
    def by_losses(self, model: nn.Module, pairs: int, apart: int) -> None:
        """Tune by pairs of losses; `apart`: how far the steps of the directions are apart."""
        training = TwoPoint(model.named_parameters(), seed=self.seed)
        for step in range(pairs):
            images, labels = self.batch(step)
            found = training.estimate(
                step,
                lambda x=images, y=labels: F.cross_entropy(model(x), y).item(),  # type: ignore[misc]
            )
            if found.finite:
                training.apply(step + apart, RATE * (1 - step / pairs), found.slopes)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of held-out images that are recognized."""
        found = model(self.images[~self.training]).argmax(1)
        return (found == self.labels[~self.training]).float().mean().item()

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        """The mean loss on held-out images, in nats."""
        held = ~self.training
        return F.cross_entropy(model(self.images[held]), self.labels[held]).item()


def _rows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(DECODER.vocabulary_size, (16, 65), generator=generator)


def _loss(model: Llama, rows: Tensor) -> float:
    found = model(rows[:, :-1]).flatten(0, 1)
    return F.cross_entropy(found, rows[:, 1:].flatten()).item()


def _peak(before: int, work: Callable[[], object]) -> int:
    """The most bytes of tensors at once, with so many there already."""
    meter = TensorMeter("cpu")
    meter.start(before)
    work()
    return meter.stop()
