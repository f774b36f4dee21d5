"""What the convolutional classifier spends, by arithmetic: weights, activations, work.

The counts follow `convnet.py` line by line, and what a convolution's kernel takes is tried on this
machine; tests hold them against the tensors that autograd really saves, the peak that the meter
sees and PyTorch's own FLOP counter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from modicum.core.contracts.ledger import (
    ALWAYS,
    Entry,
    Ledger,
    ModelQuery,
    Phase,
    Work,
)
from modicum.core.heap import mapped_from
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine.kernels import convolution_bytes
from modicum.models.convnet import ConvNetConfig

_PLAIN = Shares()
_PACKING = 4  # bytes an element while signs become bits
_PATCH = 9  # elements of a kernel
_GENERATOR_BYTES = 5056  # the state of torch's generator, which a recomputed block restores
_SAVED: tuple[Phase, ...] = ("forward", "loss")
CONVOLUTION_INPUTS = "convolution inputs"


@dataclass(frozen=True)
class ConvBlockBytes:
    """One block at the shape of a micro-batch: bytes of what it makes and saves, all rows together.

    Args:
        config, shape: of the full model.
        number: which block, from 0.
        counts: whether a tensor of so many bytes counts; all do if left out.
    """

    config: ConvNetConfig
    shape: ModelQuery
    number: int
    counts: Callable[[int], bool] = bool

    def tensor(self, size: int) -> int:
        """Bytes of one tensor, or none where it does not count."""
        return size if self.counts(size) else 0

    @property
    def _area(self) -> int:
        """Places in height and width, of all rows."""
        return self.shape.positions * self.config.side(self.number) ** 2

    @property
    def reads(self) -> int:
        """What the convolution reads."""
        return self.tensor(self._area * self.config.inputs(self.number) * self.shape.compute_bytes)

    @property
    def makes(self) -> int:
        """What the convolution makes; norm and ReLU make as much."""
        return self.tensor(self.made * self.shape.compute_bytes)

    @property
    def made(self) -> int:
        """Elements of that."""
        return self._area * self.config.widths[self.number]

    @property
    def _weights(self) -> int:
        return self.config.widths[self.number] * self.config.inputs(self.number) * _PATCH

    @property
    def casts(self) -> int:
        """The weight in bf16, and of the first block the images."""
        if self.shape.compute_bytes == 4:
            return 0
        return self.tensor(2 * self._weights) + (0 if self.number else self.reads)

    @property
    def values(self) -> int:
        """Saved for the weight gradient of the next convolution."""
        if self.number + 1 == len(self.config.widths):
            return 0
        return self.pooled if self.config.pools(self.number) else self.makes

    @property
    def signs(self) -> int:
        """Saved by a ReLU whose output no convolution reads: it is pooled, or the last."""
        last = self.number + 1 == len(self.config.widths)
        return self.makes if last or self.config.pools(self.number) else 0

    @property
    def indices(self) -> int:
        """Saved by pooling: where the maxima were."""
        return self.tensor(8 * (self.made // 4)) if self.config.pools(self.number) else 0

    @property
    def pooled(self) -> int:
        """What pooling makes."""
        pools, made = self.config.pools(self.number), self.made * self.shape.compute_bytes
        return self.tensor(made // 4) if pools else 0

    @property
    def rest(self) -> int:
        """Saved in addition to these: casts, and a norm's input and statistics."""
        statistics = self.tensor(8 * self.shape.positions * self.config.groups)
        return self.casts + (self.makes + statistics if self.config.norm == "group" else 0)

    def saved(self, shares: Shares) -> int:
        """What is kept of it until its backward pass."""
        kept = round(shares.values * self.values) + round(shares.signs * self.signs)
        return self.rest + self.indices + kept

    def forward_peak(self, shares: Shares) -> int:
        """What it holds at its worst moment forward, in addition to what blocks before it saved."""
        relu = self.rest + 2 * self.makes
        if shares == _PLAIN:  # what pooling saves comes later, when the ReLU's input is gone
            relu = max(relu, self.saved(shares) + self._passed_on)
        else:  # what was made smaller is there in full until the block that reads it has run
            packing = _PACKING * self.makes // self.shape.compute_bytes if shares.signs < 1 else 0
            relu += packing + (self.reads if self.number else 0)
        storing = self.saved(shares) + self.values + self._workspace(self.values, shares)
        convolution = self.casts + self._kernel[0]
        return max(relu, convolution, storing if shares.values < 1 else 0)

    @property
    def passing(self) -> int:
        """What it holds at its worst moment when nothing is kept, as in an evaluation."""
        read = self.reads if self.number else 0  # the batch keeps the images
        results = (2 + (self.config.norm == "group")) * self.makes
        weight = self.tensor(2 * self._weights) if self.shape.compute_bytes < 4 else 0
        pooling = self.makes + self.pooled + self.indices
        return read + max(self.casts + self._kernel[0], weight + max(results, pooling))

    def backward_peak(self, shares: Shares) -> int:
        """The same backward: when pooling, ReLU or convolution are differentiated."""
        through = 0 if self.number == 0 else self.reads
        # What was made smaller is there in full again when it is used.
        restored = through if shares.values < 1 else 0
        # The weight's gradient is the kernel's; in bf16 a copy in fp32 comes after.
        after = self.tensor(4 * self._weights) if self.shape.compute_bytes < 4 else 0
        inner = max(self._kernel[1], self._workspace(through, shares, restore=True)) + after
        convolution = self.casts + self.makes + restored + inner
        relu = self.makes if shares.signs < 1 else 0  # what a policy unpacked
        if not self.signs:
            return max(relu + self.saved(shares) + 2 * self.makes, convolution)
        signs = self.rest + round(shares.signs * self.signs)
        pooling = signs + self.indices + self.makes + self.pooled
        return max(relu + signs + 2 * self.makes, pooling, convolution)

    @property
    def _passed_on(self) -> int:
        """What the last block's pooling makes: the head reads it, and nothing saves it."""
        return self.pooled if self.number + 1 == len(self.config.widths) else 0

    def _workspace(self, size: int, shares: Shares, *, restore: bool = False) -> int:
        return shares.workspace(size // self.shape.compute_bytes, restore=restore)

    @property
    def _kernel(self) -> tuple[int, int]:
        """What the convolution takes forward and backward: its results, and what it works in."""
        forward, backward = convolution_bytes(
            self.shape.positions,
            self.config.inputs(self.number),
            self.config.widths[self.number],
            self.config.side(self.number),
            half=self.shape.compute_bytes < 4,
            through=self.number > 0,
        )
        made, read = (
            each * self.shape.compute_bytes
            for each in (self.made, self._area * self.config.inputs(self.number))
        )
        through = read if self.number else 0
        return (
            self.tensor(made) + self._copies(forward - made, max(made, read)),
            self.tensor(through) + self._copies(backward - through, max(made, read)),
        )

    def _copies(self, size: int, largest: int) -> int:
        """Bytes of scratch in all, copies of what is read and made in other layouts."""
        return size if self.counts(min(size, largest)) else 0

    @property
    def flops(self) -> int:
        """Of the forward convolution."""
        return 2 * self._area * self._weights


def ledger(
    config: ConvNetConfig, shape: ModelQuery, *, recompute: bool = False, shares: Shares = _PLAIN
) -> Ledger:
    """The classifier's ledger at the shape of a micro-batch; gradients that stay are not in it.

    Args:
        shape: `sequences` images of one token each.
        recompute: whether blocks keep their input alone and run again in the backward pass.
        shares: what a policy on saved tensors leaves of them; blocks that run again save tensors of
            their own, which no policy sees.
    """
    found = _moments(config, shape, bool, recompute, shares)
    images = 4 * shape.positions * config.channels * config.size**2 * shape.micro_batches
    labels = 8 * shape.positions * shape.micro_batches
    entries = found.entries()
    mapped = _mapped_from(config, shape, recompute, shares)
    if shares == _PLAIN:
        large = _moments(config, shape, lambda size: size >= mapped, recompute, shares)
        small = _moments(config, shape, lambda size: size < mapped, recompute, shares)
        sizes = zip(entries, large.entries(), small.entries(), strict=True)
        entries = [replace(e, large=min(a.bytes, e.bytes), rest=b.bytes) for e, a, b in sizes]
    elif found.makes >= mapped:
        # What a policy makes of large tensors are small ones, and its work is on large ones still.
        works = (entry.kind == "workspace" for entry in entries)
        entries = [replace(e, large=e.bytes * w) for e, w in zip(entries, works, strict=True)]
    return Ledger.of(
        Entry("weight", 4 * config.parameter_count(), what="model"),
        *entries,
        Entry("buffer", images + labels, ALWAYS, "images"),
        *_work(config, shape, recompute),
    )


def _mapped_from(config: ConvNetConfig, shape: ModelQuery, recompute: bool, shares: Shares) -> int:
    """From how many bytes on a tensor is mapped on its own: when the heap has no place for it.

    What smaller ones have left free in the heap has a place for one that is no larger than all of
    them were together.
    """
    mapped, before = mapped_from(), 0
    while mapped > before:
        before = mapped

        def counts(size: int, least: int = mapped) -> bool:
            return size < least

        mapped = max(mapped, _moments(config, shape, counts, recompute, shares).most)
    return mapped


class _Moments(NamedTuple):
    """Bytes of the tensors that count, at the worst moment of each phase.

    Attributes:
        values, kept: that are kept for the backward pass: of convolutions' inputs, and the rest.
        live: of these when the worst block of the phase `backward` is undone.
        backward, evaluation, forward, loss: in addition.
        makes: the largest that a convolution makes.
    """

    values: int
    kept: int
    live: int
    backward: int
    evaluation: int
    forward: int
    loss: int
    makes: int

    @property
    def most(self) -> int:
        """Bytes that are there at the worst moment of all."""
        forward = self.values + self.kept + max(self.forward, self.loss)
        return max(forward, self.live + self.backward, self.evaluation)

    def entries(self) -> list[Entry]:
        """The ledger's, also those of no bytes."""
        return [
            Entry("activation", self.values, _SAVED, CONVOLUTION_INPUTS),
            Entry("activation", self.kept, _SAVED, "activations"),
            Entry("activation", self.live, ("backward",), "activations up to a block"),
            Entry("workspace", self.backward, ("backward",), "gradients of a block"),
            Entry("workspace", self.evaluation, ("evaluation",), "a block"),
            Entry("workspace", self.forward, ("forward",), "a block"),
            Entry("workspace", self.loss, ("loss",), "gradients of a block"),
        ]


def _moments(
    config: ConvNetConfig,
    shape: ModelQuery,
    counts: Callable[[int], bool],
    recompute: bool,
    shares: Shares,
) -> _Moments:
    parts = [ConvBlockBytes(config, shape, number, counts) for number in range(len(config.widths))]
    inside = _PLAIN if recompute else shares
    state = _GENERATOR_BYTES if counts(_GENERATOR_BYTES) else 0
    kept = [state + _stream(part) if recompute else part.saved(shares) for part in parts]
    before = [sum(kept[:number]) for number in range(len(parts))]
    total = sum(kept) + _head_bytes(parts[-1])
    averaging = sum(kept) + _averaging(parts[-1], recompute)
    # A block that runs again finds what it kept of itself: its input.
    there = [done + (own if recompute else 0) for done, own in zip(before, kept, strict=True)]
    forward = max(done + part.forward_peak(inside) for done, part in zip(there, parts, strict=True))
    if recompute:  # nothing is kept meanwhile, and the input of the block is in what it holds
        held = [done + part.passing for done, part in zip(before, parts, strict=True)]
        forward = max(held) + state
    forward = max(forward, averaging)
    backward = [done + part.backward_peak(inside) for done, part in zip(there, parts, strict=True)]
    if recompute:
        backward = [max(worst, done + part.forward_peak(inside)) for worst, done, part in
                    zip(backward, there, parts, strict=True)]  # fmt: skip
    # Phase `loss` ends with the last block's backward pass, and `backward` is the first one's, or
    # that of a block between which is worse than both.
    between = max(range(len(parts)), key=lambda number: backward[number])
    worst = between if backward[between] > max(backward[0], backward[-1]) else 0
    live = before[worst] + kept[worst]
    values = sum(round(shares.values * part.values) for part in parts) if not recompute else 0
    return _Moments(
        values,
        total - values,
        live,
        max(0, backward[worst] - live),
        max(part.passing for part in parts),
        max(0, forward - total),
        max(0, backward[-1] - total),
        max(part.makes for part in parts),
    )


def _stream(block: ConvBlockBytes) -> int:
    """A block's input, where that is not the images, which the batch keeps."""
    return block.reads if block.number else 0


def _head_bytes(last: ConvBlockBytes) -> int:
    """The means, the logits' logarithms and a count, and the weight in bf16."""
    config, shape = last.config, last.shape
    half = shape.compute_bytes < 4
    weight = 2 * config.classes * config.widths[-1] if half else 0
    means = shape.positions * config.widths[-1] * shape.compute_bytes
    return sum(map(last.tensor, (weight, means, 4 * shape.positions * config.classes, 4)))


def _averaging(last: ConvBlockBytes, recompute: bool) -> int:
    """What is there while the head takes means: the last block's output, on a CPU in fp32 too."""
    item, pools = last.shape.compute_bytes, last.config.pools(last.number)
    elements = last.made // (4 if pools else 1)
    means = last.shape.positions * last.config.widths[-1]
    kept = not recompute and not pools  # a ReLU has saved it
    made = [] if kept else [elements * item]
    copies = [4 * elements, 4 * means] if item < 4 else []
    return sum(map(last.tensor, [*made, item * means, *copies]))


def _work(config: ConvNetConfig, shape: ModelQuery, recompute: bool) -> tuple[Work, Work]:
    parts = [ConvBlockBytes(config, shape, number) for number in range(len(config.widths))]
    dtype = "bfloat16" if shape.compute_bytes < 4 else "float32"
    head = 2 * shape.positions * config.classes * config.widths[-1]
    forward = sum(part.flops for part in parts)
    # The first convolution's input takes no gradient.
    backward = 2 * forward - parts[0].flops + (forward if recompute else 0)
    return (
        Work(forward + head, dtype=dtype),
        Work(backward + 2 * head, dtype=dtype, phase="backward"),
    )
