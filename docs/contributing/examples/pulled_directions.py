"""PulledDirections: an adapter in one file that looks at data, and has a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor
from modicum.adapters.blocks import first_norm
from modicum.adapters.lora import LoRA
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import (
    Against,
    Info,
    Names,
    NonNegativeFloat,
    PositiveInt,
    Probability,
)
from modicum.core.contracts.run_hooks import ExtraLoss, PassKind, RunHook
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.layers.calibration import calibrate
from modicum.core.random import normal_
from modicum.models import ModelConfig, create
from modicum.proofs import run_battery
from modicum.proofs.adapters.permutation_bench import PermutationBench
from modicum.proofs.base import ProofRun, ratios


class PulledLayer(AdapterLayer):
    """h + V^T tanh(G V dropout(h)) after a block, with V [k, width] from data and G [k, k]."""

    method: PulledDirections
    G: Tensor
    V: Tensor
    noting = False
    moved: Tensor | None = None

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = base(inputs)
        wide = hidden
        if not torch.is_autocast_enabled(hidden.device.type):
            wide = hidden.to(torch.promote_types(hidden.dtype, self.G.dtype))
        found = F.linear(F.dropout(wide, self.method.dropout, self.training), self.V)
        moved = torch.tanh(F.linear(found, self.G))
        if self.noting:
            self.moved = moved
        return (hidden + F.linear(moved, self.V.T)).to(hidden.dtype)

    def change(self, weight: Tensor, bias: Tensor | None) -> None:
        return None


class Pull(RunHook):
    """The adapter's own term of the loss: how far it moves a position, squared, on average."""

    def __init__(self, attached: AttachedAdapter) -> None:
        self.attached = attached

    @contextmanager
    def forward_context(self, kind: PassKind) -> Iterator[None]:
        """Have the layers keep what they add, for `extra_loss`; not where a block runs again."""
        for layer in self.layers():
            layer.noting, layer.moved = kind in ("train", "rehearse"), None
        try:
            yield
        finally:
            for layer in self.layers():
                layer.noting = False

    def extra_loss(self) -> ExtraLoss | None:
        """pull |V^T t|^2, which is |t|^2 as rows of V are orthonormal, a position and layer."""
        moved = [layer.moved.float() for layer in self.layers() if layer.moved is not None]
        if not moved:
            return None
        total = torch.stack([each.square().sum() for each in moved]).sum()
        positions = sum(each.numel() // each.shape[-1] for each in moved)
        return ExtraLoss(self.layers()[0].method.pull * total, positions)

    def layers(self) -> list[PulledLayer]:
        """The adapter's, on the model."""
        return [layer for _, layer in self.attached.layers() if isinstance(layer, PulledLayer)]


class PulledDirections(Adapter):
    """A small nonlinear map after each block, along the directions in which data vary most.

    What a block gives is read along k directions V, mapped by a trained G, bent by tanh and added
    back along the same directions. V are the first eigenvectors of the second moment of what the
    block reads, so that the k^2 trained numbers of a block are where activations are large. A block
    whose data need fewer directions gets fewer. G starts random, so the model is another at first;
    a term of the loss pulls the addition towards nothing. Nothing of it can be merged.

    Prefer LoRA wherever it fits: this is an example of what an adapter may do.

    Args:
        rank: k at most, of each block.
        share: of the second moment's trace, what the directions of a block must hold.
        examples: how many to look at.
        pull: the weight of the term of the loss.
        from_data: False takes random directions, as many.
        dropout, targets, exclude: see `Adapter`; `all-blocks` are the targets.

    Source: ours, as an example.

    >>> from modicum.models import ModelConfig, create
    >>> model = create(ModelConfig(vocabulary_size=32, width=16, layers=2, heads=2), seed=0)
    >>> batches = [torch.arange(64).view(4, 16) % 32]
    >>> value = PulledDirections(rank=4)
    >>> adapter = value.attach(model, batches=batches, loss=lambda m, b: m(b).square().sum())
    >>> hook = value.run_hook(adapter)
    >>> with hook.forward_context("train"):
    ...     loss = model(batches[0]).square().mean()
    ...     term = hook.extra_loss()
    >>> (loss + term.sum / term.count).backward()
    """

    info = Info(
        name="pulled_directions",
        title="PulledDirections: a small nonlinear map along the data's directions",
        room="adapters",
        paper="none: an example",
        claim="a lower loss than with random directions after as many steps, at as many parameters",
        traits=(
            "adapts_base",
            "after_block",
            "starts_elsewhere",
            "prepares_from_data",
            "exact_resume",
            "compiles",
        ),
        claim_verdict="holds",
        against=Against("worse", "LoRA of nearly as many parameters"),
        reason="half the loss over the floor that random directions leave, four times LoRA's",
        tiny={"rank": 3},
    )
    search = SearchTable({"rank": IntegerRange(1, 64, 8, log=True)}, size="rank")
    layer = PulledLayer
    needs_input = False

    targets: Names = ("all-blocks",)
    rank: PositiveInt = 8
    share: Probability = 0.99
    examples: PositiveInt = 256
    pull: NonNegativeFloat = 0.01
    from_data: bool = True

    @property
    def looks_at(self) -> int:
        return self.examples

    def prepare(self, context: PreparationContext) -> Preparation:
        norms = {}
        for site in context.sites:
            norm = first_norm(context.model.get_submodule(site.name))
            assert norm is not None
            norms[site.name] = f"{site.name}.{norm[0]}"
        found = calibrate(
            context.model,
            context.batches,
            context.loss,
            layers=norms.values(),
            statistics=("moment",),
            limit=-(-self.examples // context.ranks.size),
            ranks=context.ranks,
            progress=context.progress,
        )
        values, tensors = {}, {}
        for name, read in norms.items():
            sizes, vectors = torch.linalg.eigh(found.mean("moment", read))
            held = sizes.flip(0).cumsum(0) / sizes.sum()
            count = min(self.rank, int((held < self.share).sum()) + 1)
            if not self.from_data:
                drawn = normal_(torch.empty_like(vectors), seed=context.seed, name=name)
                vectors = torch.linalg.qr(drawn)[0]
            directions = vectors.flip(1)[:, :count].T
            # A direction's sign is nobody's choice: the largest entry is positive.
            largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
            values[name] = {"rank": count}
            tensors[name] = {"V": (directions * largest.sign()).float()}
        return Preparation(values, tensors)

    def run_hook(self, bound: AttachedAdapter) -> Pull:
        return Pull(bound)

    def width(self, site: Site) -> int:
        """k at a site: what data asked for, and before they are looked at what is allowed."""
        return int(site.prepared.get("rank", min(self.rank, site.out_features)))

    def factors(self, site: Site) -> Mapping[str, Factor]:
        return {"G": Factor((self.width(site),) * 2, std=self.width(site) ** -0.5)}

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {"V": Factor((self.width(site), site.out_features))}

    def saved_elements(self, site: Site) -> int:
        return 2 * self.width(site)

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        k, width = self.width(at.site), at.site.out_features
        through, between = 4 * at.shape.positions * k * width, 2 * at.shape.positions * k * k
        return Work(through + between), Work(through + 2 * between, phase="backward")


def prove(run: ProofRun) -> None:
    """Directions of the data against random ones, where a decoder learns other permutations.

    The best simple alternative is LoRA at nearly as many parameters.
    """
    value = PulledDirections(rank=32, share=0.9999, pull=1e-3)
    random = value.with_fields(from_data=False)
    contender = run.contender(value, null=random, null_is="random directions")
    bench = PermutationBench(run)
    ours, theirs = bench.best(contender), bench.best(random)
    lora = bench.best(LoRA(rank=1), baseline=True)
    for name, other in (("random directions", theirs), ("LoRA", lora)):
        for figure in ("excess", "trained"):
            mine, its = ours.mean(figure), other.mean(figure)
            run.figure(f"{figure}, over {name}", method=mine, baseline=its)
    each = ratios(ours.each("excess"), theirs.each("excess"))
    over = ours.mean("excess") / theirs.mean("excess")
    run.at_most("loss over the floor, of random directions'", over, 0.95, seeds=each)
    each = ratios(ours.each("excess"), lora.each("excess"))
    run.against("LoRA of nearly as many parameters", "loss over the floor", each)


def test_it_passes_the_battery_of_its_room() -> None:
    results = run_battery(PulledDirections)
    assert [(each.name, each.message) for each in results if not each.passed] == []


def test_a_block_has_as_many_directions_as_its_data_need() -> None:
    model = create(ModelConfig(vocabulary_size=8, width=16, layers=2, heads=2), seed=0)
    same = [torch.zeros(4, 6, dtype=torch.int64)]
    adapter = PulledDirections().attach(model, batches=same, loss=lambda m, b: m(b).sum())
    first, second = (layer.get_buffer("V") for _, layer in adapter.layers())
    assert first.shape == (1, 16)
    assert 1 <= second.shape[0] < 16
    assert torch.allclose(first @ first.T, torch.ones(1, 1), atol=1e-5)


def test_the_pull_is_the_mean_of_what_is_added() -> None:
    value = PulledDirections(rank=4, pull=0.5)
    model = create(ModelConfig(vocabulary_size=32, width=16, layers=2, heads=2), seed=0)
    ids = torch.arange(64).view(4, 16) % 32
    adapter = value.attach(model, batches=[ids], loss=lambda m, b: m(b).square().sum())
    hook = value.run_hook(adapter)
    with hook.forward_context("train"):
        model(ids)
        term = hook.extra_loss()
    assert term is not None
    added = []
    for layer in hook.layers():
        assert layer.moved is not None
        added.append(F.linear(layer.moved, layer.V.T).square().sum(-1).mean())
    assert torch.isclose(term.sum / term.count, 0.5 * torch.stack(added).mean())
    with hook.forward_context("evaluate"):
        model(ids)
    assert hook.extra_loss() is None
