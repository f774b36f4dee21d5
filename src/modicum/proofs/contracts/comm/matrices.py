"""What an exchange of full gradient matrices promises: sums, debts, bytes, nothing too early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from modicum.comm.base import MatrixMethod
from modicum.core.contracts.method import Method
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.ddp_callback import HookedUpdates
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, MatrixQuery
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.comm.subjects import (
    CommSubject,
    NamedWeights,
    Odd,
    comm_check,
    furthest,
    loss_of,
    weights,
)
from modicum.proofs.contracts.comm.two_ranks import RankFinding, on_two_ranks
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers
from modicum.proofs.distances import worst

# Two buckets; what is small or has one dimension may travel as it is.
BUCKETS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"wide": (24, 56), "bias": (24,), "small": (3, 4)},
    {"convolution": (16, 3, 3, 5), "unused": (20, 30)},
)
UPDATES, STEPS, NEAR, FALLS = 40, 6, 0.25, 0.95


def matrices(subject: CommSubject) -> MatrixMethod:
    """The value to be checked.

    Raises:
        NotApplicable: the method does not exchange full matrices.
    """
    value = subject if isinstance(subject, Method) else subject.tiny()
    if not isinstance(value, MatrixMethod):
        name = value.info.name
        raise NotApplicable(f"{name} exchanges no matrices, and this is a check of those that do")
    return value


@comm_check(proves="alone")
def check_matrices_alone(subject: CommSubject) -> None:
    """One process alone exchanges nothing: sums are its own gradients."""
    value = matrices(subject)
    bound = value.bind(ExchangeContext())
    own = {name: _gradient(name, 0, 0) for name in BUCKETS[0]}
    for name, total in bound.begin(own, set(own)).land().items():
        assert total is not None, f"alone, there is no sum of {name}"
        assert torch.equal(total.full(), own[name]), f"alone, the sum of {name} is another"
        assert torch.equal(total.rows(1, 3), own[name][1:3]), f"alone, rows of {name} are others"
    sent = sum(wire.bytes for wire in value.ledger(_at(1)).wire)
    assert sent == 0, f"the ledger says {sent} bytes of traffic of one process"


@comm_check(expensive=True)
def check_matrices_sums(subject: CommSubject) -> None:
    """At two ranks sums are alike to the bit, have their rows, and over updates lose nothing."""
    found = on_two_ranks(two_ranks, matrices(subject))
    assert all(one["digests"] == found[0]["digests"] for one in found), "ranks' sums differ"
    for one in found:
        assert one["rows"] <= 1e-5, f"rows of a sum differ from the sum by {one['rows']:.3g}"
        assert one["far"] <= NEAR, (
            f"{UPDATES} sums together are {one['far']:.3g} from those of the gradients, and {NEAR} "
            "is allowed"
        )


@comm_check(expensive=True)
def check_matrices_traffic(subject: CommSubject) -> None:
    """The ledger's bytes and calls of an update are those that the meter counts at two ranks."""
    value = matrices(subject)
    said, calls = dict[str, int](), dict[str, int]()
    for wire in value.ledger(_at(2)).wire:
        said[wire.collective] = said.get(wire.collective, 0) + UPDATES * wire.bytes
        calls[wire.collective] = calls.get(wire.collective, 0) + UPDATES * wire.count
    for found in on_two_ranks(two_ranks, value):
        assert found["sent"] == said, f"the meter counts {found['sent']}, the ledger says {said}"
        assert found["calls"] == calls, f"there are {found['calls']} calls, the ledger says {calls}"


@comm_check(expensive=True)
def check_matrices_used(subject: CommSubject) -> None:
    """A gradient that one rank has gets a sum on all, and one that none has gets none."""
    for found in on_two_ranks(two_ranks, matrices(subject)):
        assert found["unused"] == [True, False], "who has a gradient is not known on all ranks"


@comm_check(expensive=True)
def check_matrices_skipped(subject: CommSubject) -> None:
    """A NaN on one rank is in all ranks' sums, and a discarded update leaves no trace."""
    for found in on_two_ranks(two_ranks, matrices(subject)):
        assert found["spoiled"], "a NaN was summed to finite numbers"
        assert found["untouched"], "after a discarded update what is sent next is another"


@comm_check(expensive=True)
def check_matrices_resume(subject: CommSubject) -> None:
    """With the state of one that ran on, another exchange continues to the same bits."""
    for found in on_two_ranks(two_ranks, matrices(subject)):
        assert found["resumed"], "a second exchange with the first one's state sums otherwise"


@comm_check(expensive=True)
def check_matrices_regrouped(subject: CommSubject) -> None:
    """What ranks owe keeps its sum where their number changes, to 1e-6."""
    for found in on_two_ranks(two_ranks, matrices(subject)):
        assert found["regrouped"] <= 1e-6, f"debts change by {found['regrouped']:.3g} of their size"


@comm_check(expensive=True)
def check_matrices_in_training(subject: CommSubject) -> None:
    """On replicas, sharded masters and FSDP2: one model, skipped updates change nothing."""
    for found in on_two_ranks(in_training, matrices(subject)):
        for kind, one in found.items():
            assert one["alike"], f"{kind}: the ranks' weights differ"
            assert one["kept"], f"{kind}: an update with a NaN on one rank changed weights or state"
            assert one["finite"], f"{kind}: weights are not finite"
        for kind, like in {"zero": "ddp", "fsdp": "zeros"}.items():
            if kind in found:
                far = furthest_lists(found[kind]["weights"], found[like]["weights"])
                assert far <= 5e-3, f"on {kind} a weight is {far:.3g} from the replicas'"


@comm_check(expensive=True, proves="transformers")
def check_matrices_under_transformers(subject: CommSubject) -> None:
    """As a hook of `transformers.Trainer`'s DDP: one model on all ranks, with losses near DDP's."""
    value = matrices(subject)
    hugging_face_llama()  # or it is not installed
    first, second = on_two_ranks(under_transformers, value)
    assert first["weights"] == second["weights"], "the ranks' weights differ"
    assert first["updates"] == UPDATES, f"of {UPDATES} updates {first['updates']} were committed"
    fallen, plain = (first[name][0] - sum(first[name][-8:]) / 8 for name in ("losses", "plain"))
    assert fallen >= FALLS * plain, (
        f"the loss falls by {fallen:.4g}, and by {plain:.4g} with plain sums, of which {FALLS:.0%} "
        "are asked for"
    )


def two_ranks(ranks: Ranks, value: MatrixMethod) -> dict[str, Any]:
    """What an exchange makes of sums, sends, owes, and remembers."""

    def bind() -> MatrixExchange:
        return value.bind(ExchangeContext(ranks, seed=5))

    first, rows = bind(), 0.0
    totals, wanted, digests = NamedWeights(), NamedWeights(), list[float]()
    for update in range(UPDATES):
        sums, apart = _update(first, ranks, update)
        rows = worst((rows, apart))
        for name, total in sums.items():
            totals[name] = totals.get(name, torch.zeros_like(total)) + total
            digests.append(float(total.double().sum()))
            for rank in range(ranks.size):
                own = _gradient(name, update, rank)
                wanted[name] = wanted.get(name, torch.zeros_like(own)) + own
    sent = dict(first.wire.meter.bytes), dict(first.wire.meter.calls)
    state = _state(first)
    second = bind()
    _restore(second, state)
    last, _ = _update(first, ranks, -1, spoil=True)
    spoiled = not any(bool(total.isfinite().all()) for total in last.values())
    untouched = _same(_state(first), state)
    nexts = [_update(each, ranks, UPDATES)[0] for each in (first, second)]
    return {
        "rows": rows,
        "far": worst(_distance(totals[name], wanted[name]) for name in totals),
        "digests": digests,
        "sent": sent[0],
        "calls": sent[1],
        "unused": _unused(bind(), ranks),
        "spoiled": spoiled,
        "untouched": untouched,
        "resumed": _same({"": nexts[0]}, {"": nexts[1]}),
        "regrouped": _regrouped(first, ranks),
    }


def _gradient(name: str, update: int, rank: int) -> Tensor:
    """Much that stays and is of rank 4, and some that is new each time and of full rank."""
    shape = next(shapes[name] for shapes in BUCKETS if name in shapes)
    number = sorted(name for shapes in BUCKETS for name in shapes).index(name)
    stays = torch.Generator().manual_seed(number)
    new = torch.Generator().manual_seed(1000 * (update + 2) + 10 * number + rank)
    left = torch.randn(shape[0], 4, generator=stays)
    right = torch.randn(4, math.prod(shape[1:]), generator=stays)
    return (left @ right / 2).view(shape) + 0.3 * torch.randn(shape, generator=new)


def _update(
    bound: MatrixExchange, ranks: Ranks, update: int, *, spoil: bool = False
) -> tuple[NamedWeights, float]:
    """The sums of an update, and how far their rows are from them; spoilt, it is discarded."""
    pending = []
    for shapes in BUCKETS:
        own = {name: _gradient(name, update, ranks.rank) for name in shapes}
        if spoil and ranks.first:
            for gradient in own.values():
                gradient.view(-1)[1] = math.nan
        pending.append(bound.begin(own, set(own)))
    bound.turn()
    sums, apart = NamedWeights(), 0.0
    for each in pending:
        for name, total in each.land().items():
            assert total is not None, f"there is no sum of {name}"
            sums[name] = total.full().clone()
            off = float((total.rows(1, 3) - sums[name][1:3]).abs().max())
            apart = worst((apart, off))
    if spoil:
        bound.discard()
    else:
        bound.commit()
    return sums, apart


def _state(bound: MatrixExchange) -> dict[str, dict[str, Any]]:
    """Copies of all views of an exchange."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return {
        view.name: {name: copied(value) for name, value in view.read().items()}
        for view in bound.views()
    }


def _restore(bound: MatrixExchange, state: Mapping[str, Mapping[str, Any]]) -> None:
    for view in bound.views():
        view.write(state[view.name])


def _same(one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether two states are the same to the bit."""

    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return one.keys() == other.keys() and all(
        view.keys() == other[name].keys() and all(equal(view[n], other[name][n]) for n in view)
        for name, view in one.items()
    )


def _regrouped(bound: MatrixExchange, ranks: Ranks) -> float:
    """How far what is owed per rank is from its sum when three ranks take it up, then two."""
    off = 0.0
    for view in bound.views():
        if not view.per_rank:
            continue
        assert view.regroup is not None, f"{view.name} does not say who owes after a regrouping"
        for name in sorted(view.read()):
            flat = view.read()[name].flatten()
            everybody = ranks.gather_tensor(flat)
            taken = view.regroup([{name: each} for each in everybody * 3])[name]
            wanted = 3 * torch.stack(everybody).double().sum(0) / ranks.size
            off = worst((off, _distance(taken.double(), wanted)))
    return off


def _unused(bound: MatrixExchange, ranks: Ranks) -> list[bool]:
    """Of a gradient that no rank has, and of one that rank 0 alone has: whether there is no sum."""
    own = {name: _gradient(name, 0, ranks.rank) for name in ("unused", "convolution")}
    used = {"convolution"} if ranks.first else set[str]()
    zeros = {name: own[name] if name in used else torch.zeros_like(own[name]) for name in own}
    sums = bound.begin(zeros, used).land()
    bound.commit()
    return [sums[name] is None for name in own]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def _at(ranks: int) -> MatrixQuery:
    return MatrixQuery(tuple(tuple(shapes.values()) for shapes in BUCKETS), ranks)


def in_training(ranks: Ranks, value: MatrixMethod) -> dict[str, Any]:
    """Weights of a small model after some updates, one of which is skipped.

    FSDP2 gives a weight that was not used a gradient of zeros, so what is owed of it is paid at
    once; replicas owe it until the weight is used again. `zeros` are replicas with such gradients.
    """
    found: dict[str, Any] = {}
    for kind in ("ddp", "zero", *(("zeros", "fsdp") if value.sums_matrices_on_rows else ())):
        bound = value.bind(ExchangeContext(ranks, seed=5))
        strategy: Strategy
        if kind in {"ddp", "zeros"}:
            strategy = Replicated(ranks, Layout.of(ranks.size), 2000, bound)
        elif kind == "zero":
            strategy = Zero(ranks, bucket_bytes=2000, matrices=bound)
        else:
            strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), matrices=bound)
        model = Odd()
        model.zeros = kind == "zeros"
        # FSDP2 sums gradients of one dtype at once.
        strategy.cut(model, [model.wide, model.narrow], torch.device("cpu"))
        strategy.start(model)
        trained = [parameter for _, parameter in strategy.trained(model)]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        kept = True
        for step in range(STEPS):
            before = weights(model), _state(bound)
            spoiled = step == STEPS // 2
            _step(ranks, strategy, model, optimizer, step, spoil=spoiled)
            if spoiled:
                same = furthest(weights(model), before[0]) == 0
                kept = same and _same(_state(bound), before[1])
        own = weights(model)
        digests = ranks.gather({name: float(w.double().sum()) for name, w in own.items()})
        found[kind] = {
            "alike": all(digest == digests[0] for digest in digests),
            "kept": kept,
            "finite": all(bool(weight.isfinite().all()) for weight in own.values()),
            "weights": {name: weight.flatten().tolist() for name, weight in own.items()},
        }
    return found


def _step(
    ranks: Ranks,
    strategy: Strategy,
    model: Odd,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    spoil: bool,
) -> None:
    """Two micro-batches, the norm, and the update unless that is not finite, as a trainer does."""
    for part in range(2):
        loss = loss_of(model, step, 2 * ranks.rank + part) / (2 * ranks.size)
        strategy.before_backward(last=part == 1)
        (loss * math.nan if spoil and not ranks.first else loss).backward()
    strategy.after_backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = strategy.norm(parameters)
    size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if math.isfinite(size):
        strategy.update(optimizer)
    else:
        strategy.discard()
    optimizer.zero_grad(set_to_none=True)


def under_transformers(ranks: Ranks, value: MatrixMethod) -> RankFinding:
    """A rank's part: `transformers.Trainer` with and without the method, two micro-batches each."""
    hooked: list[HookedUpdates] = []

    def callback(trainer: Any) -> Any:
        hooked.append(cast("HookedUpdates", value.callback(trainer)))
        return hooked[0]

    def train(model: Any, **given: Any) -> list[float]:
        starts = torch.randint(29, (64, 1), generator=torch.Generator().manual_seed(0))
        return train_under_transformers(
            model, (starts + torch.arange(8)) % 29, max_steps=UPDATES, max_grad_norm=0.0,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), lr_scheduler_type="constant",
            gradient_accumulation_steps=2, logging_steps=1, ddp_backend="gloo", **given,
        )  # fmt: skip

    plain = train(hugging_face_llama())
    losses = train(model := hugging_face_llama(), given_trainer=callback)
    assert hooked[0].hook is not None
    return {
        "plain": plain,
        "losses": losses,
        "updates": hooked[0].hook.exchange.step,
        "weights": [float(p.detach().double().sum()) for p in model.parameters()],
    }


def furthest_lists(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    """The largest difference of a number."""
    named: list[NamedWeights] = [
        {name: torch.tensor(values) for name, values in each.items()} for each in (one, other)
    ]
    return furthest(named[0], named[1])
