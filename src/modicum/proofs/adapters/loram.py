"""The proof of LoRAM: what is learned on a pruned model is worth as much in the full one, or not.

The testbed's decoder (`permutation_bench.py`) loses neurons of its MLPs by magnitude; a LoRA is
trained on what is left, and its file is loaded on the decoder that has them all. Of the gap between
the untrained full model and a LoRA that was trained on it, the quick run asks how much is closed at
a quarter and at half of the neurons, at equal steps. The
null gives the same factors to other neurons than those that were kept.

Two more things are seen: what becomes of the modes that fine-tuning does not touch, in the full
model and in the small one, which is the reason to return to the full one; and the bytes of the base
in training, by formula and as held, next to the loss that they buy. There is no single factor: the
curve is given by share and form. The best simple alternative is the small model itself, as it was
tuned, which costs the same to train and less to serve.

Three quarters are shown to fail; the full run has 90 % too, bases in four bits, bases without
random neurons, and the paper's alignment: steps on the old modes of all the small model's weights
before the LoRA.

Reduced: the paper's 70B models, its corpora for alignment, its first-order scores on text (the
magnitude is the same here), and its unstructured variants, for which modicum has no pruner. The
quick run has a smaller decoder, 2 seeds and one learning rate, where the full one has 5 and each
arm its own best.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, LoRAM, load
from modicum.compress import StructuredPruning
from modicum.core.layers.full_model import FullModel, full_model_of, note_full_model
from modicum.core.layers.map_kept import KeptUnits, Reduction
from modicum.core.machine.memory import tensor_bytes
from modicum.linears import NF4
from modicum.proofs.adapters.permutation_bench import (
    ADAPTER_RATES,
    CHANGED,
    PermutationBench,
    PermutationSize,
)
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.permutations import MODES
from modicum.proofs.bench.sweep import Sweep, Swept

RANK, QUICK_RATE = 4, 3e-2
BARS = {0.25: 0.99, 0.5: 0.9}
HEAVY = (0.75, 0.9)  # shares at which the transfer is to fail
UNTOUCHED = range(CHANGED, MODES)
ALIGNMENT_STEPS, ALIGNMENT_RATE = 100, 1e-3


@dataclass(frozen=True)
class OnPart:
    """A LoRA on what is left of the base without a share of its neurons.

    Args:
        share: of the neurons that go; 0 leaves the full model.
        four_bits: whether the linear layers that are left are NF4.
        aligned: whether the small model was trained on the old modes first.
        random: whether random neurons go, and not those of the least magnitude.
        misplaced: whether the file says that the first neurons were kept, whichever were.
    """

    share: float = 0.0
    four_bits: bool = False
    aligned: bool = False
    random: bool = False
    misplaced: bool = False


@dataclass(frozen=True)
class TunedOnPart:
    """What one fine-tuning run ended with.

    Args:
        small: loss above the floor of the model that was trained, in nats a token.
        full: the same of the full model with the adapter's file.
        small_untouched, full_untouched: on the modes that were not changed alone.
        base_bytes: of the base in training, as held.
    """

    small: float
    full: float
    small_untouched: float
    full_untouched: float
    base_bytes: int


class PartBench:
    """The testbed with a base that loses neurons."""

    def __init__(self, run: ProofRun) -> None:
        self.plain = PermutationBench(run)
        if run.full:
            self.plain.seeds = run.seeds = tuple(range(5))
        self.sweep = Sweep(run, self.tune, _loss_in_full, chosen_by="first")

    def best(self, arm: OnPart, rates: Sequence[float]) -> Swept[TunedOnPart]:
        """An arm at that rate which is best for the full model from the first seed, if several."""
        if len(rates) == 1:
            return self.at(arm, rates[0])
        return self.sweep.best(repr(arm), arm, rates)

    def at(self, arm: OnPart, rate: float) -> Swept[TunedOnPart]:
        """An arm at one rate."""
        found = [self.sweep.outcome(repr(arm), arm, rate, seed) for seed in self.plain.seeds]
        return Swept(rate, tuple(found), (rate,))

    def untrained(self, seed: int) -> float:
        """The full model's loss above the floor, before anything is learned."""
        return self.plain.source.excess(self.plain.base, self.plain.new(seed))

    def part(self, arm: OnPart) -> nn.Module:
        """The base that an arm trains on."""
        model = copy.deepcopy(self.plain.base)
        if arm.share:
            score: Literal["random", "magnitude"] = "random" if arm.random else "magnitude"
            pruning = StructuredPruning(score=score, neurons=arm.share)
            pruning.fit(model, pruning.calibrate(model, [], _no_loss))
        if arm.aligned:
            optimizer = torch.optim.AdamW(model.parameters(), lr=ALIGNMENT_RATE, weight_decay=0.0)
            self.plain.fit(model.train(), optimizer, self.plain.old, ALIGNMENT_STEPS, 10_000)
        if arm.misplaced:
            full = full_model_of(model)
            assert full is not None
            note_full_model(model, FullModel(_first_ones(full.reduction)))
        if arm.four_bits:
            NF4().convert(model)
        return model

    def tune(self, arm: OnPart, learning_rate: float, seed: int) -> TunedOnPart:
        """Train a LoRA on the part, and load its file on the full model."""
        bench, table = self.plain, self.plain.new(seed)
        small, full = self.part(arm), copy.deepcopy(bench.base)
        held = tensor_bytes([*small.parameters(), *small.buffers()])
        value = LoRAM(rank=RANK) if arm.share else LoRA(rank=RANK)
        attached = value.attach(small, seed=seed)
        optimizer = torch.optim.AdamW(attached.parameters(), lr=learning_rate, weight_decay=0.0)
        small.train()
        bench.fit(small, optimizer, table, bench.size.steps, 1 + seed)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            attached.save(folder)
            load(full, folder)
        excess = bench.source.excess
        return TunedOnPart(
            small=excess(small, table),
            full=excess(full, table),
            small_untouched=excess(small, table, UNTOUCHED),
            full_untouched=excess(full, table, UNTOUCHED),
            base_bytes=held,
        )


def prove(run: ProofRun) -> None:
    """How much of the gap is closed in the full model, at which bytes, and what is forgotten."""
    bench = PartBench(run)
    rates = ADAPTER_RATES if run.full else (QUICK_RATE,)
    lora = bench.best(OnPart(), rates)
    before = [bench.untrained(seed) for seed in run.seeds]
    best: dict[float, Swept[TunedOnPart]] = {}
    for share, bar in BARS.items():
        null = OnPart(share, misplaced=True)
        contender = run.contender(OnPart(share), null=null, null_is="other neurons' places")
        best[share] = bench.best(contender, rates)
        closed = report(run, f"{share:.0%} pruned", best[share], before, lora)
        sentence = f"of LoRA's gap, closed in the full model at {share:.0%} pruned"
        run.at_least(sentence, fmean(closed), bar, seeds=closed)
    for share in HEAVY if run.full else HEAVY[:1]:
        arm = OnPart(share)
        best[share] = bench.best(arm, rates)
        report(run, f"{share:.0%} pruned, which is to fail", best[share], before, lora)
    heavy = best[HEAVY[0]]
    kept = ratios(heavy.each("full_untouched"), heavy.each("small_untouched"))
    sentence = f"loss on untouched modes at {HEAVY[0]:.0%}, over the small model's"
    run.at_most(sentence, fmean(kept), 1.0, part="check", seeds=kept)
    stored_bytes(run, bench)
    if run.full:
        variants(run, bench, best, before, lora)
    light = min(BARS)
    over_small = ratios(best[light].each("full"), best[light].each("small"))
    sentence = f"loss above the floor on all modes at {light:.0%} pruned"
    run.against("the small model itself, as tuned", sentence, over_small)


def report(
    run: ProofRun,
    where: str,
    mine: Swept[TunedOnPart],
    before: list[float],
    lora: Swept[TunedOnPart],
) -> list[float]:
    """Figures next to the LoRA that was trained on the full model; how much of its gap is closed.

    The latter is of each seed.
    """
    each = zip(before, mine.each("full"), lora.each("full"), strict=True)
    closed = [(start - ours) / (start - theirs) for start, ours, theirs in each]
    run.figure(f"of LoRA's gap, closed in the full model, {where}", method=fmean(closed),
               baseline=1.0)  # fmt: skip
    for figure, what in (
        ("full", "loss above the floor (nats), in the full model"),
        ("small", "the same of the small model that was trained"),
        ("full_untouched", "loss above the floor on untouched modes, in the full model"),
        ("small_untouched", "the same on them of the small model"),
        ("base_bytes", "bytes of the base in training"),
    ):
        run.figure(f"{what}, {where}", method=mine.mean(figure), baseline=lora.mean(figure))
    run.figure(f"learning rate, {where}", method=mine.learning_rate, baseline=lora.learning_rate)
    return closed


def stored_bytes(run: ProofRun, bench: PartBench) -> None:
    """The base's bytes in training by formula, dense; those of four bits as held."""
    size = bench.plain.size
    off = 0
    full = tensor_bytes([*bench.part(OnPart()).parameters()])
    for share in (*BARS, *HEAVY):
        dense = tensor_bytes([*bench.part(OnPart(share)).parameters()])
        off = max(off, abs(dense - bytes_of(size, share)))
        four = bench.part(OnPart(share, four_bits=True))
        held = tensor_bytes([*four.parameters(), *four.buffers()])
        run.figure(f"bytes of the dense base, {share:.0%} pruned", method=dense, baseline=full)
        run.figure(f"bytes of the base in NF4, {share:.0%} pruned", method=held, baseline=full)
    run.at_most("bytes of the dense base, off their formula", off, 0, part="check")


def bytes_of(size: PermutationSize, share: float) -> int:
    """Of an fp32 decoder without a share of its neurons: embeddings, head, norms, matrices."""
    inner = size.mlp_width - int(share * size.mlp_width + 1e-9)
    block = 4 * size.width**2 + 3 * size.width * inner + 2 * size.width
    words = size.model.vocabulary_size * size.width * (1 if size.model.tied_embeddings else 2)
    return 4 * (words + size.blocks * block + size.width)


def variants(
    run: ProofRun,
    bench: PartBench,
    best: Mapping[float, Swept[TunedOnPart]],
    before: list[float],
    lora: Swept[TunedOnPart],
) -> None:
    """Bases in four bits, aligned ones, and ones without random neurons, each at the plain rate."""
    arms = [(share, "in NF4", OnPart(share, four_bits=True)) for share in (*BARS, *HEAVY)]
    for share in BARS:
        arms.append((share, "aligned", OnPart(share, aligned=True)))
        arms.append((share, "random neurons", OnPart(share, random=True)))
    for share, name, arm in arms:
        mine = bench.at(arm, best[share].learning_rate)
        report(run, f"{share:.0%} pruned, {name}", mine, before, lora)


def _first_ones(kept: Reduction) -> Reduction:
    """As many units of each part, its first ones."""
    first = (KeptUnits(part.units, tuple(range(len(part.kept)))) for part in kept.parts)
    return Reduction(tuple(first))


def _loss_in_full(outcome: TunedOnPart) -> float:
    return outcome.full


def _no_loss(model: nn.Module, batch: object) -> Tensor:
    raise TypeError("magnitude looks at no data")
