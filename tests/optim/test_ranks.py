"""Optimizers on several ranks: replicas, sharded matrices with owners, checkpoints between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import CONFIG, LAYOUTS, strategy_of
from pool import Pool
from torch import Tensor, nn

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.ledger import OptimizerQuery as At
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.contracts.state import StateRegistry, model_view, optimizer_view
from modicum.core.contracts.stepping import Stepper
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.models.llama import Llama
from modicum.optim import (
    FRUGAL,
    MARS,
    SOAP,
    AdamMini,
    AuON,
    Cautious,
    DCTAdamW,
    GaLore,
    Kron,
    Lion,
    Muon,
    NAdamW,
    Scion,
    Trion,
)
from modicum.parallel.zero import Zero
from modicum.proofs.contracts.optim.subjects import loss, tokens

pytestmark = pytest.mark.ranks
SMALL: dict[str, Any] = {"rank": 2, "update_gap": 3, "weight_decay": 0.1}
DECAYED: dict[str, Any] = {"weight_decay": 0.1}
# Adam's first steps are of one size whatever the gradient's: its roundings would be seen.
ROUGH: dict[str, Any] = {**DECAYED, "epsilon": 1e-3}
# Of a factor without full rank the eigenvectors are any, and roundings choose: Adam's epsilon is so
# large that its direction is all but the momentum, which no basis changes.
TURNED: dict[str, Any] = {**DECAYED, "epsilon": 10.0, "block_size": 11}
KINDS: list[tuple[type, dict[str, Any]]] = [
    *((kind, DECAYED) for kind in (Muon, Lion, NAdamW, Cautious, MARS, AdamMini, AuON, Scion)),
    (DCTAdamW, {**ROUGH, "rank": 3, "feedback_bits": 32}),
    (Trion, {**DECAYED, "rank": 3}),
    (FRUGAL, {**ROUGH, "density": 0.5, "update_gap": 2}),
    (FRUGAL, {**ROUGH, "density": 0.5, "update_gap": 2, "order": "random"}),
    (FRUGAL, {**ROUGH, "density": 0.4, "update_gap": 2, "part": "columns"}),
    (SOAP, {**TURNED, "frequency": 2}),
    (Kron, {**DECAYED, "adam_epsilon": 1e-3, "block_size": 11}),
]
ZERO = "zero 2"
# Twelve rows for the batch, which all numbers of ranks here divide.
BATCH = 12


class OptimizerQuery:
    """The decoder, an optimizer and a strategy, as the trainer puts them together."""

    def __init__(self, ranks: Ranks, layout: str, **fields: Any) -> None:
        zero = layout == ZERO
        self.ranks, self.strategy = ranks, Zero(ranks) if zero else strategy_of(ranks, layout)
        with on_meta():
            self.model = Llama(CONFIG)
        blocks = self.model.model.layers
        self.strategy.cut(self.model, blocks, torch.device("cpu"))
        materialise(self.model, "cpu")
        self.model.initialise(0)
        self.strategy.start(self.model)
        kind: Any = fields.pop("kind", GaLore)
        value = kind.value(**((SMALL if kind is GaLore else DECAYED) | fields))
        groups = optimizer_groups(
            self.model,
            learning_rate=1e-2,
            weight_decay=value.fields()["weight_decay"],
            trained=dict(self.strategy.trained(self.model)),
        )
        self.optimizer: Any = value.bind(groups)
        assert isinstance(self.optimizer, kind)
        if LAYOUTS.get(layout) == (2, 1):
            self.optimizer.replicas = torch.distributed.group.WORLD
        self.registry = StateRegistry()
        self.registry.add_view(model_view(self.model))
        self.registry.add_view(optimizer_view(self.optimizer))
        if self.in_backward:
            stepper = Stepper(self.optimizer)

            def update(parameter: nn.Parameter) -> None:
                stepper.step([parameter])
                parameter.grad = None

            self.strategy.when_ready(self.model, update)

    @property
    def in_backward(self) -> bool:
        return bool(getattr(self.optimizer, "in_backward", False))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            mine = tokens(BATCH, seed=step).split(BATCH // self.ranks.size)[self.ranks.rank]
            self.strategy.before_backward(last=True)
            (loss(self.model, mine) / self.ranks.size).backward()
            self.strategy.after_backward()
            if self.in_backward:
                assert all(parameter.grad is None for parameter in self.model.parameters())
            self.strategy.update(self.optimizer)
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        self.strategy.rest(self.model)
        return {n: whole(p.detach()).clone() for n, p in self.model.named_parameters()}

    def owned(self) -> set[str]:
        """Names of the matrices whose state is here."""
        return {
            name
            for group in self.optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if group["matrix"] and self.optimizer.state.get(parameter)
        }


def trained(ranks: Ranks, layout: str, fields: dict[str, Any]) -> Any:
    training = OptimizerQuery(ranks, layout, **fields)
    training.steps(0, 5)
    kept = bytes_by_kind(training.model, training.optimizer)["optimizer"]
    return training.weights(), training.owned(), kept


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "alone"])
def test_updates_are_those_of_one_process(pool: Pool, layout: str) -> None:
    weights, matrices, _ = trained(Ranks(), "alone", {})
    assert len(matrices) == 2 * 7
    count, shards = LAYOUTS[layout]
    results = pool.run(trained, layout, {}, ranks=count)
    for found, _, _ in results:
        close(found, weights)
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)
    owned = [names for _, names, _ in results]
    for replica in range(count // shards):
        group = owned[replica * shards :][:shards]
        # Each matrix has one owner among the ranks that hold one copy of the weights.
        assert sorted(name for names in group for name in names) == sorted(matrices)
    with on_meta():
        shapes = trained_shapes(Llama(CONFIG))
    said = GaLore.value(**SMALL).ledger(At(shapes, shards=shards)).bytes("optimizer")
    assert said == max(kept for _, _, kept in results)


@pytest.mark.parametrize("layout", ["ddp 2", ZERO, "fsdp 2", "fsdp 3", "hybrid 4"])
@pytest.mark.parametrize(("kind", "fields"), KINDS, ids=str)
def test_full_matrices_and_elements_alike_go_where_one_process_has_them(
    pool: Pool, kind: type, fields: dict[str, Any], layout: str
) -> None:
    weights, matrices, _ = trained(Ranks(), "alone", {"kind": kind, **fields})
    count, shards = LAYOUTS.get(layout, (2, 2))
    results = pool.run(trained, layout, {"kind": kind, **fields}, ranks=count)
    for found, _, _ in results:
        # A copy of the weights is the same to the bit.
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    owned = [name for _, names, _ in results[:shards] for name in names]
    if kind in (Muon, Scion, DCTAdamW, Trion, FRUGAL, SOAP, Kron):
        assert sorted(owned) == sorted(matrices)
    with on_meta():
        shapes = trained_shapes(Llama(CONFIG))
    value = kind.value(**fields)  # type: ignore[attr-defined]
    said = value.ledger(At(shapes, shards=shards)).bytes("optimizer")
    held = max(kept for _, _, kept in results)
    # Of matrices that take turns, some turns have more than others.
    takes_turns = kind is FRUGAL and "part" not in fields
    assert held <= said if takes_turns else held == said


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "fsdp 3", "hybrid 4"])
def test_in_the_backward_pass_it_is_the_same_to_the_bit(pool: Pool, layout: str) -> None:
    count = LAYOUTS[layout][0]
    later = pool.run(trained, layout, {}, ranks=count)
    early = pool.run(trained, layout, {"in_backward": True}, ranks=count)
    for (one, owned, kept), (other, owned_too, kept_too) in zip(later, early, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert (owned, kept) == (owned_too, kept_too)


def saved(ranks: Ranks, layout: str, folder: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    training = OptimizerQuery(ranks, layout, **fields)
    training.steps(0, 4)  # in the middle between two refreshes
    CheckpointStore(folder, ranks=ranks).save(4, training.registry)
    training.steps(4, 8)
    return training.weights()


def resumed(ranks: Ranks, layout: str, folder: Path, fields: dict[str, Any]) -> Any:
    training = OptimizerQuery(ranks, layout, **fields)
    training.steps(20, 21)
    checkpoint = CheckpointStore(folder, ranks=ranks).newest()
    assert checkpoint is not None
    checkpoint.load(training.registry)
    owned = training.owned()
    training.steps(4, 8)
    assert owned == training.owned()
    return training.weights(), owned


@pytest.mark.expensive
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"on_refresh": "rotate", "stagger": True},
        {"kind": DCTAdamW, "rank": 3, "feedback_bits": 4},
        {"kind": Trion, "rank": 3},
        {"kind": SOAP, "block_size": 11, "frequency": 3},
        {"kind": Kron, "block_size": 11, "flat_steps": 1, "probability_decay": 0.5},
        {"kind": FRUGAL, "density": 0.5, "update_gap": 3, "order": "random"},
        {"kind": FRUGAL, "density": 0.4, "update_gap": 3, "part": "entries"},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 3", "hybrid 4"])
def test_a_run_resumes_to_the_bit(
    pool: Pool, layout: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    count = LAYOUTS[layout][0]
    straight = pool.run(saved, layout, tmp_path, fields, ranks=count)
    for found, (again, _) in zip(
        straight, pool.run(resumed, layout, tmp_path, fields, ranks=count), strict=True
    ):
        assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("alone", "fsdp 3"),
        ("fsdp 3", "alone"),
        ("fsdp 2", "fsdp 3"),
        ("ddp 2", "fsdp 2"),
        ("fsdp 4", "ddp 2"),
        ("hybrid 4", "fsdp 4"),
    ],
)
def test_a_run_resumes_on_another_layout(
    pool: Pool, before: str, after: str, tmp_path: Path
) -> None:
    straight = pool.run(saved, before, tmp_path, {}, ranks=LAYOUTS[before][0])[0]
    results = pool.run(resumed, after, tmp_path, {}, ranks=LAYOUTS[after][0])
    for found, _ in results:
        close(found, straight)
    shards = LAYOUTS[after][1]
    names = [name for _, owned in results[:shards] for name in owned]
    assert len(names) == len(set(names)) == 2 * 7


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("before", "after"), [("fsdp 3", "fsdp 3"), ("alone", "fsdp 2"), ("fsdp 2", "alone")]
)
@pytest.mark.parametrize("kind", [Cautious, MARS, AdamMini, AuON])
def test_methods_that_go_by_rows_resume_on_any_layout(
    pool: Pool, kind: type, before: str, after: str, tmp_path: Path
) -> None:
    fields = {"kind": kind}
    straight = pool.run(saved, before, tmp_path, fields, ranks=LAYOUTS[before][0])[0]
    for found, _ in pool.run(resumed, after, tmp_path, fields, ranks=LAYOUTS[after][0]):
        for name, weight in straight.items():
            if before == after:
                assert torch.equal(found[name], weight), name
            else:
                torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.expensive
@pytest.mark.parametrize(("before", "after"), [("alone", "fsdp 3"), ("fsdp 2", "alone")])
@pytest.mark.parametrize(
    "fields",
    [{"kind": SOAP, **TURNED}, {"kind": Kron, "adam_epsilon": 1e-3, "block_size": 11}],
    ids=str,
)
def test_factors_of_blocks_resume_on_any_layout(
    pool: Pool, fields: dict[str, Any], before: str, after: str, tmp_path: Path
) -> None:
    straight = pool.run(saved, before, tmp_path, fields, ranks=LAYOUTS[before][0])[0]
    for found, _ in pool.run(resumed, after, tmp_path, fields, ranks=LAYOUTS[after][0]):
        for name, weight in straight.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5, msg=name)


def with_other_gradients(ranks: Ranks, shared: bool) -> Tensor:
    """Ranks whose gradients differ, as SVDs on hosts of different kinds may."""
    weight = nn.Parameter(torch.ones(5, 4))
    optimizer = GaLore([weight], rank=2)
    if shared:
        optimizer.replicas = torch.distributed.group.WORLD
    weight.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(ranks.rank))
    optimizer.step()
    return optimizer.state[weight]["right"]


def test_replicas_take_the_first_ones_bases(pool: Pool) -> None:
    one, other = pool.run(with_other_gradients, False)
    assert not torch.equal(one, other)
    shared, too = pool.run(with_other_gradients, True)
    assert torch.equal(shared, one)
    assert torch.equal(too, one)
