"""What an exchange of sharded data parallelism promises: sums, copies that agree, its bytes."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import torch
from torch import Tensor

from modicum.comm.base import MatrixMethod, Schedule
from modicum.core.contracts.method import Method
from modicum.core.ranks.exchange import ExchangeContext, ExchangeQuery, ShardExchange
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.comm.subjects import CommSubject, comm_check
from modicum.proofs.contracts.comm.two_ranks import on_two_ranks
from modicum.proofs.distances import worst

WIDTHS, UPDATES, NEAR = (37, 4000), 30, 0.25


def exchange(subject: CommSubject) -> Method:
    """The value to be checked.

    Raises:
        NotApplicable: the method is a schedule, or exchanges full matrices.
    """
    value = subject if isinstance(subject, Method) else subject.tiny()
    for kind, is_one in (("a schedule", Schedule), ("an exchange of matrices", MatrixMethod)):
        if isinstance(value, is_one):
            raise NotApplicable(f"{value.info.name} is {kind}, and this is a check of shards'")
    return value


@comm_check(proves="alone")
def check_exchange_alone(subject: CommSubject) -> None:
    """One process alone exchanges nothing: sums are its own rows, weights arrive as they are."""
    value = exchange(subject)
    bound = cast(ShardExchange, value.bind(ExchangeContext()))
    rows, copy = torch.randn(1, 100), torch.zeros(1, 100)
    assert torch.equal(bound.reduce_scatter(rows.clone(), "rows")(), rows[0]), (
        "alone, the sum of a row is another than the row"
    )
    bound.spread(copy, rows[0])()
    assert torch.equal(copy, rows), "alone, spread weights are other than what was spread"
    sent = sum(wire.bytes for wire in value.ledger(ExchangeQuery((100,), 1, 1)).wire)
    assert sent == 0, f"the ledger says {sent} bytes of traffic of one process"


@comm_check(expensive=True)
def check_exchange_sums(subject: CommSubject) -> None:
    """At two ranks each gets the sum of its own row, as near as the codec allows."""
    for rank, found in enumerate(on_two_ranks(two_ranks, exchange(subject))):
        assert found["far"] <= NEAR, (
            f"rank {rank}'s sum is off by {found['far']:.3g} of its norm, and {NEAR} is allowed"
        )


@comm_check(expensive=True)
def check_exchange_copies(subject: CommSubject) -> None:
    """Copies are the same on all ranks after every update, and follow the weights."""
    ranks = on_two_ranks(two_ranks, exchange(subject))
    assert all(found["copies"] == ranks[0]["copies"] for found in ranks), "ranks' copies differ"
    for found in ranks:
        assert found["apart"] <= NEAR, (
            f"copies are {found['apart']:.3g} of an update from their weights, after {UPDATES}"
        )


@comm_check(expensive=True)
def check_exchange_traffic(subject: CommSubject) -> None:
    """The ledger's bytes of an update are those that the meter counts at two ranks."""
    value = exchange(subject)
    said: dict[str, int] = {}
    for wire in value.ledger(ExchangeQuery(WIDTHS, 2, 2)).wire:
        name = f"{wire.collective} along {wire.axis}"
        said[name] = said.get(name, 0) + UPDATES * wire.bytes
    for found in on_two_ranks(two_ranks, value):
        assert found["sent"] == said, f"the meter counts {found['sent']}, the ledger says {said}"


@comm_check(expensive=True)
def check_exchange_resumes(subject: CommSubject) -> None:
    """With the state of one that ran on, another exchange continues to the same bits."""
    for found in on_two_ranks(two_ranks, exchange(subject)):
        assert found["resumed"], "a second exchange with the first one's state rounds otherwise"


@comm_check(expensive=True)
def check_exchange_not_finite(subject: CommSubject) -> None:
    """A gradient that is not finite on one rank is not finite where its sum arrives."""
    for found in on_two_ranks(two_ranks, exchange(subject)):
        assert found["spoiled"], "a NaN was summed to a finite number"


def two_ranks(ranks: Ranks, value: Method) -> dict[str, Any]:
    """What an exchange does to sums and copies, sends, and remembers."""

    def bind() -> ShardExchange:
        return cast(ShardExchange, value.bind(ExchangeContext(ranks, seed=5)))

    first, far, apart = bind(), 0.0, 0.0
    copies = [torch.zeros(ranks.size, width) for width in WIDTHS]
    shards = [torch.zeros(width) for width in WIDTHS]
    for update in range(UPDATES):
        for number, width in enumerate(WIDTHS):
            total = first.reduce_scatter(_gradients(ranks.rank, update, width), f"{number}")()
            expected = sum(_gradients(rank, update, width) for rank in range(ranks.size))
            far = worst((far, _distance(total, cast(Tensor, expected)[ranks.rank])))
            shards[number] += 1e-3 * total
            first.refresh(copies[number], shards[number], f"{number}")()
            apart = float((copies[number][ranks.rank] - shards[number]).norm()) / float(
                (1e-3 * total).norm()
            )
        first.advance()
    second = bind()
    second.load_state_dict(json.loads(json.dumps(dict(first.state_dict()))))
    return {
        "far": far,
        "apart": apart,
        "copies": [float(copy.double().sum()) for copy in copies],
        "sent": {f"{name} along {axis}": n for (name, axis), n in first.sent().items()},
        "resumed": _once(first, copies, shards) == _once(second, copies, shards),
        "spoiled": not math.isfinite(_spoiled(bind(), ranks)),
    }


def _gradients(rank: int, update: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * update + 10 * width + rank)
    return torch.randn(2, width, generator=generator)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _once(bound: ShardExchange, copies: list[Tensor], shards: list[Tensor]) -> list[float]:
    """Sums of what one more update would bring."""
    results = []
    for number, width in enumerate(WIDTHS):
        total = bound.reduce_scatter(_gradients(bound.ranks.rank, -1, width), f"{number}")()
        copy = bound.refresh(copies[number].clone(), shards[number] + 0.1, f"{number}")()
        results += [float(total.double().sum()), float(copy.double().sum())]
    return results


def _spoiled(bound: ShardExchange, ranks: Ranks) -> float:
    """The sum of a row in which one rank has a NaN."""
    rows = torch.ones(ranks.size, 200)
    if ranks.rank == 0:
        rows[:, 70] = math.nan
    return float(bound.reduce_scatter(rows, "spoiled")().sum())
