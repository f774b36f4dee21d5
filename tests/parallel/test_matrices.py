"""Exchanges of full matrices on replicas and sharded masters: bits, skips, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modicum.checkpoint import CheckpointStore
from modicum.comm import ACPSGD, DenseSums, PowerSGD
from modicum.comm.base import MatrixMethod
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part, whole
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero

ranked = pytest.mark.ranks
METHODS: dict[str, MatrixMethod] = {
    "acp_sgd": ACPSGD(rank=2),
    "powersgd": PowerSGD(rank=2),
    "late": ACPSGD(rank=2, start_after=2),
}
Weights = dict[str, Tensor]


class Small(nn.Module):
    """Widths that no number of ranks divides; a tied weight; a layer that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(13, 19), nn.Linear(19, 13)
        self.third = nn.Linear(13, 19)
        self.third.weight = self.first.weight
        self.sometimes = nn.Linear(19, 11)

    def forward(self, x: Tensor, *, all_of_it: bool) -> Tensor:
        x = self.third(self.second(self.first(x).tanh()).tanh())
        return self.sometimes(x) if all_of_it else x


class Run:
    """A model under a strategy, in a loop like the trainer's."""

    def __init__(
        self, ranks: Ranks, kind: str, exchange: MatrixExchange | None, half: bool = False
    ) -> None:
        self.ranks, self.exchange = ranks, exchange
        self.strategy: Strategy
        if kind == "zero":
            self.strategy = Zero(ranks, bucket_bytes=1000, matrices=exchange)
        elif kind == "fsdp":
            self.strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), matrices=exchange)
        elif kind == "hybrid":
            self.strategy = Sharded(ranks, Layout.of(ranks.size, 2), matrices=exchange)
        else:
            self.strategy = Replicated(ranks, Layout.of(ranks.size), 1000, exchange)
        self.model = Small().to(torch.bfloat16 if half else torch.float32)
        self.strategy.cut(self.model, [self.model.second], torch.device("cpu"))
        self.strategy.start(self.model)
        named = list(self.strategy.trained(self.model))
        group = {"params": [p for _, p in named], "names": [n for n, _ in named]}
        self.optimizer = torch.optim.SGD([group], lr=0.05, momentum=0.9)
        self.registry = StateRegistry()
        self.strategy.register(self.registry, self.model)
        self.registry.add_view(optimizer_view(self.optimizer))

    def term(self) -> Tensor:
        """A term of the loss that reads what this rank holds of the weights."""
        parameters = self.optimizer.param_groups[0]["params"]
        holders = [1 if isinstance(p, DTensor) else self.ranks.size for p in parameters]
        squares = (own_part(p)[0].float().square().sum() for p in parameters)
        return 0.1 * torch.stack([s / n for s, n in zip(squares, holders, strict=True)]).sum()

    def step(self, step: int, spoil: bool = False, term: str = "") -> None:
        dtype = next(self.model.parameters()).dtype
        for part in range(2):
            seed = 100 * step + 10 * part + self.ranks.rank
            x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed)).to(dtype)
            # What was computed last is the first in the backward pass.
            early = self.term() if term == "last" else None
            loss = self.model(x, all_of_it=self.ranks.first).float().square().sum() / 8
            if early is not None or term == "first":
                loss = loss + (self.term() if early is None else early)
            self.strategy.before_backward(last=part == 1)
            (loss * math.nan if spoil and self.ranks.rank == 1 else loss).backward()
        self.strategy.after_backward()
        parameters = self.optimizer.param_groups[0]["params"]
        norm = whole(self.strategy.norm(parameters))
        self.strategy.clip(parameters, 1.0, norm)
        if math.isfinite(float(norm)):
            self.strategy.update(self.optimizer)
        else:
            self.strategy.discard()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Weights:
        trained = self.strategy.trained(self.model)
        return {name: whole(p.detach()).float().clone() for name, p in trained}

    def state(self) -> dict[str, Any]:
        """All state, copied, by view and name."""
        return {
            f"{view}/{name}": whole(value).clone() if isinstance(value, Tensor) else value
            for view, entries in self.registry.read().items()
            for name, value in entries.items()
        }


def context_of(ranks: Ranks, kind: str) -> ExchangeContext:
    hybrid = Layout.of(ranks.size, 2) if kind == "hybrid" else None
    return ExchangeContext(ranks, seed=4, hybrid=hybrid)


def run_of(ranks: Ranks, kind: str, method: str, half: bool = False) -> Run:
    return Run(ranks, kind, METHODS[method].bind(context_of(ranks, kind)), half)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


def dense(ranks: Ranks) -> tuple[Weights, Weights]:
    plain, ours = Run(ranks, "ddp", None), Run(ranks, "ddp", MatrixExchange(ExchangeContext(ranks)))
    for step in range(4):
        plain.step(step)
        ours.step(step)
    return plain.weights(), ours.weights()


@ranked
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_exchange_that_changes_nothing_is_the_replicas_to_the_bit(
    pool: Pool, ranks: int
) -> None:
    for plain, ours in pool.run(dense, ranks=ranks):
        assert same(plain, ours)


def with_a_term(ranks: Ranks, kind: str, term: str, matrices: bool) -> Weights:
    run = Run(ranks, kind, MatrixExchange(ExchangeContext(ranks)) if matrices else None)
    for step in range(4):
        run.step(step, term=term)
    return run.weights()


@ranked
@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("term", ["first", "last"])
def test_a_term_that_reads_shards_is_in_their_gradients(
    pool: Pool, term: str, matrices: bool
) -> None:
    without = pool.run(with_a_term, "ddp", "none", False, ranks=2)[0]
    expected = pool.run(with_a_term, "ddp", term, False, ranks=2)[0]
    assert apart(without, expected) > 1e-3
    for found in pool.run(with_a_term, "fsdp", term, matrices, ranks=2):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def refused(ranks: Ranks, matrices: bool) -> str:
    try:
        with_a_term(ranks, "hybrid", "first", matrices)
    except InputError as error:
        return str(error)
    return "nothing"


@ranked
@pytest.mark.parametrize("matrices", [False, True])
def test_a_term_that_reads_shards_is_refused_where_hosts_hold_them_too(
    pool: Pool, matrices: bool
) -> None:
    for found in pool.run(refused, matrices, ranks=4):
        assert "not summed over hosts" in found


def trained(ranks: Ranks, kind: str, method: str) -> Weights:
    run = run_of(ranks, kind, method)
    for step in range(5):
        run.step(step)
    return run.weights()


@ranked
@pytest.mark.parametrize("method", METHODS)
def test_owners_rebuild_what_replicas_do(pool: Pool, method: str) -> None:
    kinds = ("ddp", "zero", "fsdp")
    replicas, *others = (pool.run(trained, kind, method, ranks=4) for kind in kinds)
    for ranks in (replicas, *others):
        for found in ranks:
            for name, weight in found.items():
                torch.testing.assert_close(weight, replicas[0][name], rtol=1e-4, atol=1e-5)
            assert same(found, ranks[0])


def dense_on(ranks: Ranks, kind: str, value: MatrixMethod | None) -> tuple[Weights, int]:
    """Weights after some updates with sums that are not compressed, and what was sent for them."""
    context = context_of(ranks, kind)
    exchange = MatrixExchange(context) if value is None else value.bind(context)
    run = Run(ranks, kind, exchange)
    for step in range(4):
        run.step(step)
    return run.weights(), exchange.wire.meter.bytes["all_reduce"]


@ranked
def test_hosts_sum_the_rows_of_their_ranks(pool: Pool) -> None:
    plain = pool.run(dense_on, "ddp", None, ranks=4)[0][0]
    found = pool.run(dense_on, "hybrid", None, ranks=4)
    half = pool.run(dense_on, "hybrid", DenseSums(dtype="bf16"), ranks=4)
    for (weights, sent), (rounded, fewer) in zip(found, half, strict=True):
        assert same(weights, found[0][0])
        assert same(rounded, half[0][0])
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(rounded[name], plain[name], rtol=0.05, atol=1e-2)
        assert 2 * fewer == sent
    assert any(not torch.equal(half[0][0][name], found[0][0][name]) for name in plain)


@ranked
@pytest.mark.parametrize("method", ["acp_sgd", "powersgd"])
def test_hosts_sum_low_rank_rows_alike(pool: Pool, method: str) -> None:
    found = pool.run(trained, "hybrid", method, ranks=4)
    plain = pool.run(dense_on, "ddp", None, ranks=4)[0][0]
    assert all(same(weights, found[0]) for weights in found)
    assert apart(found[0], plain) < 0.2 * apart(plain, {n: torch.zeros(()) for n in plain})


def halved(ranks: Ranks, kind: str, compressed: bool) -> tuple[Weights, set[Any]]:
    run = run_of(ranks, kind, "acp_sgd", True) if compressed else Run(ranks, kind, None, True)
    for step in range(5):
        run.step(step)
    return run.weights(), {parameter.dtype for parameter in run.model.parameters()}


@ranked
@pytest.mark.parametrize("kind", ["ddp", "zero"])
def test_half_precision(pool: Pool, kind: str) -> None:
    """As far from full precision as without an exchange, all weights together."""
    full, half = pool.run(trained, kind, "acp_sgd")[0], pool.run(halved, kind, True)
    plain = pool.run(dense_weights, kind)[0], pool.run(halved, kind, False)[0][0]
    assert all(same(weights, half[0][0]) for weights, _ in half)
    assert half[0][1] == {torch.bfloat16}
    usual = apart(plain[1], plain[0])
    assert 1e-3 < apart(half[0][0], full) < 3 * usual < 0.5


def dense_weights(ranks: Ranks, kind: str) -> Weights:
    run = Run(ranks, kind, None)
    for step in range(5):
        run.step(step)
    return run.weights()


def apart(one: Weights, other: Weights) -> float:
    """How far weights are from others, all together."""
    return math.sqrt(sum(float((one[n] - other[n]).square().sum()) for n in other))


def skipped(ranks: Ranks, kind: str, method: str) -> tuple[bool, bool]:
    """Whether a skipped update leaves the state, and the run that follows, to the bit."""
    one, other = run_of(ranks, kind, method), run_of(ranks, kind, method)
    for step in range(3):
        one.step(step)
        other.step(step)
    before = one.state()
    one.step(3, spoil=True)
    kept = same(one.state(), before)
    for step in (4, 5):
        one.step(step)
        other.step(step)
    return kept, same(one.state(), other.state())


@ranked
@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("zero", 2), ("fsdp", 2), ("hybrid", 4)])
@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_update_leaves_no_trace(pool: Pool, kind: str, ranks: int, method: str) -> None:
    assert pool.run(skipped, kind, method, ranks=ranks) == [(True, True)] * ranks


def saved(ranks: Ranks, folder: Path, kind: str, method: str, at: int) -> Any:
    """State and debts where a checkpoint was saved, and weights two updates later."""
    run, store = run_of(ranks, kind, method), CheckpointStore(folder, ranks=ranks)
    for step in range(at):
        run.step(step)
    store.save(at, run.registry)
    store.wait()
    owed = debts(run)
    for step in (at, at + 1):
        run.step(step)
    return owed, run.weights()


def taken_up(ranks: Ranks, folder: Path, kind: str, method: str, at: int, save: bool) -> Any:
    """What a run that takes a checkpoint up owes, and its weights two updates later."""
    run, store = run_of(ranks, kind, method), CheckpointStore(folder, ranks=ranks)
    checkpoint = store.newest(print)
    assert checkpoint is not None
    checkpoint.load(run.registry)
    owed = debts(run)
    if save:
        store.save(at + 1, run.registry)
        store.wait()
    for step in (at, at + 1):
        run.step(step)
    return owed, run.weights()


def debts(run: Run) -> dict[str, Any]:
    view = run.registry.views["owed"]
    owed = view.read().items()
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in owed}


@ranked
@pytest.mark.parametrize(
    ("kind", "at"), [("ddp", 3), ("zero", 2), ("zero", 1), ("fsdp", 3), ("hybrid", 3)]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_to_the_bit(
    pool: Pool, tmp_path: Path, kind: str, method: str, at: int
) -> None:
    ranks = 4 if kind == "hybrid" else 2
    there = pool.run(saved, tmp_path, kind, method, at, ranks=ranks)
    again = pool.run(taken_up, tmp_path, kind, method, at, False, ranks=ranks)
    for (owed, weights), (owed_again, weights_again) in zip(there, again, strict=True):
        assert same(owed, owed_again)
        assert same(weights, weights_again)
    assert bool(there[0][0]) == (method != "late" or at > 2)


@ranked
@pytest.mark.parametrize(("before", "after"), [("ddp", "zero"), ("zero", "fsdp"), ("fsdp", "ddp")])
def test_other_numbers_of_ranks_owe_as_much(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    two = pool.run(saved, tmp_path, before, "acp_sgd", 3)
    four = pool.run(taken_up, tmp_path, after, "acp_sgd", 3, True, ranks=4)
    back = pool.run(taken_up, tmp_path, before, "acp_sgd", 4, False)
    for name in two[0][0]:
        wanted, *others = (
            sum(owed[name].double() for owed, _ in each) for each in (two, four, back)
        )
        for total in others:
            assert float((total - wanted).norm() / wanted.norm()) < 1e-6
    assert all(same(weights, four[0][1]) for _, weights in four)


@ranked
@pytest.mark.parametrize(("before", "after"), [("hybrid", "ddp"), ("ddp", "hybrid")])
def test_other_ways_to_share_owe_as_much(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    """Ranks are as many, and what each owes is of other rows; hosts' debts add up row by row."""
    there = pool.run(saved, tmp_path, before, "acp_sgd", 3, ranks=4)
    again = pool.run(taken_up, tmp_path, after, "acp_sgd", 3, False, ranks=4)
    for name in ("first.weight", "second.weight"):
        one, other = (total_owed([owed for owed, _ in each], name) for each in (there, again))
        assert float((one - other).norm() / one.norm()) < 1e-6
    assert all(same(weights, again[0][1]) for _, weights in again)


def total_owed(ranks: list[dict[str, Any]], name: str) -> Tensor:
    """What all ranks owe of a parameter together."""
    total = torch.zeros(19, 13, dtype=torch.float64)
    total = total if name == "first.weight" else total.T.contiguous()
    for owed in ranks:
        first, end, _ = owed.get(f"{name}@rows", (0, len(total), len(total)))
        total[first:end] += owed[name].double()
    return total


def test_owes_and_updates_in_the_backward_pass_do_not_combine() -> None:
    strategy = Replicated(Ranks(), Layout(), matrices=ACPSGD().bind(ExchangeContext()))
    with pytest.raises(InputError, match="owed once its update is made"):
        strategy.when_ready(nn.Linear(2, 2), lambda parameter: None)
