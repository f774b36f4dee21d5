"""The proof of SNELLA: LoRA's accuracy at as many trained numbers, from a change of full rank.

In the lab (`digits_bench.py`) a network must change a lot: digits turned by a quarter. SNELLA with
codes of 8 numbers has what a LoRA of rank 8 has, and three scalars a layer; 0.7 of the entries end
at zero. Accuracy is compared with each side at its most accurate rate. Entries that layers get by
the importance of their codes are compared with the same share for each layer.

What the kernel is for is its rank: that of 256 x 256 distances between codes of 8 numbers, where a
LoRA of as many has 8. The optimizer's and gradients' bytes are those of the codes, against tuning
single entries with a dense state. A step takes longer than LoRA's: how much is shown, as is what
layers keep between the passes.

Reduced: the quick run has 2 seeds and 3 learning rates, the full one 5 of each; and the same share
for each layer is tried at SNELLA's own best rate alone, which can only flatter SNELLA. The full run
also has SNELL, entries shared out at random, a kernel of which nothing is zero, and SHiRA. ViT-B
and its images are not run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import Adapter
from modicum.adapters.lora import LoRA
from modicum.adapters.shira import SHiRA
from modicum.adapters.snella import SNELLA, SharingSteps, SNELLALayer
from modicum.core.random import normal_, uniform_
from modicum.proofs.adapters.activation_bench import ActivationBench
from modicum.proofs.adapters.digits_bench import RATES as LORA_RATES
from modicum.proofs.adapters.digits_bench import Curve, DigitsBench
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.meters import in_turns, saved_bytes
from modicum.proofs.bench.sweep import Swept

RANK, ZEROS = 8, 0.7
WIDTH = 256
VIT, VIT_RANK = 768, 32
TIMED, POSITIONS = 512, 256
RATES = (1e-2, 2e-2, 3e-2, 4e-2, 6e-2)
QUICK_RATES, QUICK_LORA_RATES = (2e-2, 3e-2, 4.5e-2), (1e-2, 2e-2, 3e-2)
SHIRA_RATES = (3e-2, 1e-1, 2e-1)


class AtRandomSteps(SharingSteps):
    """Layers have scores that are drawn anew at each hand-out."""

    def scores(self) -> dict[str, float]:
        sites = list(self.attached.sites)
        name = f"scores {self.updates}"
        drawn = uniform_(torch.empty(len(sites)), 0.0, 1.0, seed=self.attached.seed, name=name)
        return dict(zip(sites, drawn.tolist(), strict=True))


class AtRandom(SNELLA):
    """SNELLA whose entries are shared out at random."""

    def run_hook(self, bound: Attachment) -> object:
        return AtRandomSteps(bound)


def prove(run: ProofRun) -> None:
    """Accuracy against LoRA, sharing against none, ranks, bytes and seconds."""
    run.seeds = tuple(range(5 if run.full else 2))
    lora = LoRA(rank=RANK)
    value = run.contender(
        SNELLA(rank=RANK, zeros=ZEROS, every=10, falling=100),
        null=LoRA(rank=1),
        null_is="LoRA of rank 1 in SNELLA's place",
    )
    accuracy(run, value, lora)
    found = rank_of(value)
    label = f"rank of a {WIDTH} x {WIDTH} change"
    run.figure(label, method=found, baseline=rank_of(lora))
    run.at_least(label, found, 240)
    spent(run)


def accuracy(run: ProofRun, value: Adapter, lora: LoRA) -> None:
    """On images that nobody has seen, each side at its most accurate rate."""
    bench = DigitsBench(run)

    def best(adapter: Adapter, *, baseline: bool = False) -> Swept[Curve]:
        rates = RATES if run.full else QUICK_RATES
        if isinstance(adapter, LoRA):
            rates = LORA_RATES if run.full else QUICK_LORA_RATES
        if isinstance(adapter, SHiRA):
            rates = SHIRA_RATES
        return bench.most_accurate(adapter, rates, baseline=baseline)

    mine, rival = best(value), best(lora, baseline=True)
    shared = SNELLA(rank=RANK, zeros=ZEROS, share="uniform")
    if run.full:
        uniform = best(shared).outcomes
    else:
        uniform = tuple(bench.adapt(shared, mine.learning_rate, seed) for seed in run.seeds)
    sides = {f"LoRA of rank {RANK}": rival}
    if run.full:
        random = AtRandom(rank=RANK, zeros=ZEROS, every=10, falling=100)
        sides["entries shared out at random"] = best(random)
        sides["SNELL"] = best(shared.with_fields(softmax=False))
        sides["SNELL without |K|"] = best(shared.with_fields(softmax=False, gain="one"))
        sides["nothing zero"] = best(shared.with_fields(zeros=0.0))
        sides["SHiRA of as many numbers"] = best(SHiRA(rank=RANK))
    for name, side in sides.items():
        for figure in ("accuracy", "trained"):
            label, own = f"{figure}, against {name}", mine.mean(figure)
            run.figure(label, method=own, baseline=side.mean(figure))
    ours, theirs = mine.outcomes, rival.outcomes
    run.figure(
        "accuracy, against the same share for each layer",
        method=mine.mean("accuracy"),
        baseline=fmean(curve.accuracy for curve in uniform),
    )
    run.figure(
        "loss after the first step, against LoRA",
        method=fmean(curve.losses[0] for curve in ours),
        baseline=fmean(curve.losses[0] for curve in theirs),
    )
    more = mine.mean("trained") / rival.mean("trained")
    run.at_most("trained numbers, of LoRA's", more, 1.001, part="check")
    above = _above(ours, theirs)
    run.at_least(f"accuracy above LoRA's of rank {RANK}", fmean(above), 0.0, seeds=above)
    above = _above(ours, uniform)
    sentence = "accuracy above that with the same share for each layer"
    run.at_least(sentence, fmean(above), 0.0, part="check", seeds=above)
    each = ratios(mine.each("error"), rival.each("error"))
    run.against("LoRA of as many trained numbers", "test errors", each)


def _above(ours: Sequence[Curve], theirs: Sequence[Curve]) -> list[float]:
    return [a.accuracy - b.accuracy for a, b in zip(ours, theirs, strict=True)]


def rank_of(value: Adapter) -> int:
    """The numerical rank, in fp32, of what a method makes of random factors; nothing is zeroed."""
    if isinstance(value, SNELLA):
        value = value.with_fields(zeros=0.0, gain="one", softmax=False)
    [(_, layer)] = _on_one(value, WIDTH).layers()
    with torch.no_grad():
        for name, factor in layer.named_parameters():
            normal_(factor, seed=0, name=name)
    return int(torch.linalg.matrix_rank(layer.delta().detach()))


def spent(run: ProofRun) -> None:
    """Bytes of optimizer and gradients, bytes between the passes, and seconds of a step."""
    layer = _on_one(SNELLA(rank=VIT_RANK, softmax=False), VIT)
    codes = sum(12 * factor.numel() for factor in layer.parameters())
    label = f"bytes of gradients and Adam's state, {VIT} x {VIT}, against tuning entries"
    run.figure(label, method=codes, baseline=12 * VIT * VIT)
    bench = ActivationBench()
    kept = bench.kept(SNELLA(rank=RANK)), bench.kept(LoRA(rank=RANK))
    label = "bytes kept for the backward pass, against LoRA"
    found = run.figure(label, method=kept[0], baseline=kept[1])
    run.at_most("kept for the backward pass, of LoRA's", found.ratio, 1.0, part="check")
    plain = _kept_by_the_plain_branch()
    label = "bytes kept of one layer and 64 positions, against the branch without building anew"
    run.figure(label, method=plain[0], baseline=plain[1])
    steps = {
        name: _step(adapter)
        for name, adapter in (("SNELLA", SNELLA(rank=RANK)), ("LoRA", LoRA(rank=RANK)))
    }
    taken = in_turns(steps, 9 if run.full else 5)
    label = f"milliseconds of a step, {TIMED} x {TIMED} at {POSITIONS} positions, against LoRA"
    times = (1e3 * taken[name].fastest for name in ("SNELLA", "LoRA"))
    run.figure(label, method=next(times), baseline=next(times))


def _kept_by_the_plain_branch() -> tuple[int, int]:
    """Bytes between the passes: of the layer, and of the same sum of ordinary operations."""
    adapter, inputs, found = _on_one(SNELLA(rank=RANK), WIDTH), _inputs(64, WIDTH), []
    model, [(_, layer)] = adapter.model, adapter.layers()
    assert isinstance(layer, SNELLALayer)
    weight = model.get_parameter("0.weight")

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight + layer.method.rule.built(layer.tensors())[0])

    for run in (model, plain):
        with saved_bytes([*model.parameters(), *model.buffers()]) as kept:
            run(inputs).sum()
        found.append(kept.total)
    return found[0], found[1]


def _step(value: Adapter) -> Callable[[], None]:
    adapter, inputs = _on_one(value, TIMED), _inputs(POSITIONS, TIMED).requires_grad_()

    def step() -> None:
        adapter.model(inputs).sum().backward()

    return step


def _on_one(value: Adapter, width: int) -> AttachedAdapter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width))
    return value.attach(model)


def _inputs(rows: int, width: int) -> Tensor:
    return normal_(torch.empty(rows, width), seed=0, name="inputs")
