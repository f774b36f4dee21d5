"""Methods of matrices in a loop of one's own: weights of the trainer's replicas, in any of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.comm import ACPSGD, DeAR, DenseSums, PowerSGD, SDP4Bit
from modicum.comm.base import MatrixMethod
from modicum.core.errors import InputError
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.exchange_file import load_exchange, save_exchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded

METHODS = [DenseSums(), DenseSums(dtype="bf16"), PowerSGD(rank=2), ACPSGD(rank=2)]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)
STEPS = 6


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 19), nn.Tanh(), nn.Linear(19, 11), nn.Linear(11, 3))


def loss_of(model: nn.Module, ranks: Ranks, step: int, part: int = 0) -> Tensor:
    """The mean over this rank's samples."""
    seed = 100 * step + 10 * part + ranks.rank
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x).square().mean()
    return loss


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def by_wrap(ranks: Ranks, method: MatrixMethod, mean: bool = True) -> dict[str, Tensor]:
    model = small(ranks.rank)  # all ranks get rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = method.wrap(model, optimizer, reduction="mean" if mean else "sum", seed=3)
    for step in range(STEPS):
        loss = loss_of(model, ranks, step)
        handle.backward(loss if mean else loss / ranks.size)
        handle.step()
    return weights(model)


def by_reduce(ranks: Ranks, method: MatrixMethod) -> dict[str, Tensor]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = method.bind(ExchangeContext(ranks, seed=3))
    for step in range(STEPS):
        (loss_of(model, ranks, step) / ranks.size).backward()
        exchange.reduce(model)
        optimizer.step()
        exchange.commit()
        optimizer.zero_grad()
    return weights(model)


def by_replicas(ranks: Ranks, method: MatrixMethod) -> dict[str, Tensor]:
    """As the trainer makes them."""
    model, exchange = small(), method.bind(ExchangeContext(ranks, seed=3))
    strategy = Replicated(ranks, Layout.of(ranks.size), matrices=exchange)
    strategy.start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        strategy.before_backward(last=True)
        (loss_of(model, ranks, step) / ranks.size).backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.ranks
@each_method
def test_weights_are_those_of_reduce_and_of_the_trainers_replicas(
    pool: Pool, method: MatrixMethod
) -> None:
    sums = pool.run(by_wrap, method, False)
    for other in (*sums, *pool.run(by_reduce, method), *pool.run(by_replicas, method)):
        assert all(torch.equal(other[name], sums[0][name]) for name in sums[0])
    means = pool.run(by_wrap, method)
    for name, weight in means[0].items():
        assert torch.equal(weight, means[1][name])
        torch.testing.assert_close(weight, sums[0][name], rtol=1e-5, atol=1e-6)


def accumulated(ranks: Ranks, method: MatrixMethod) -> Any:
    """Two micro-batches an update, clipped, one of them spoilt; and the same by `reduce`."""
    ours, theirs = small(), small()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    handle = method.wrap(ours, optimizers[0], reduction="sum")
    exchange, norms = method.bind(ExchangeContext(ranks)), []
    for step in range(5):
        for part in range(2):
            bad = math.nan if step == 3 and part == 0 and ranks.rank == 1 else 1.0
            handle.backward(loss_of(ours, ranks, step, part) * bad, last=part == 1)
            (loss_of(theirs, ranks, step, part) * bad).backward()
        norm = handle.step(clip_norm=0.5)
        assert norm is not None
        exchange.reduce(theirs)
        norms.append([float(norm), float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))])
        if math.isfinite(norms[-1][1]):
            optimizers[1].step()
        exchange.commit()  # nobody looked
        optimizers[1].zero_grad()
    strategy: Any = handle.strategy
    same = all(torch.equal(weight, weights(theirs)[name]) for name, weight in weights(ours).items())
    return norms, same, (strategy.matrices.step, exchange.step)


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS[2:], ids=str)
def test_micro_batches_add_up_and_what_is_not_finite_is_passed_over(
    pool: Pool, method: MatrixMethod
) -> None:
    for norms, same, counted in pool.run(accumulated, method):
        assert all(one == other for one, other in norms if math.isfinite(other))
        assert [math.isfinite(one) for one, _ in norms] == [True, True, True, False, True]
        assert same
        assert counted == (4, 4)


def resumed(ranks: Ranks, folder: Path) -> bool:
    """Whether a loop that takes weights and debts up is the one that ran on, to the bit."""
    models = [small(), small()]
    one, other = (
        ACPSGD(rank=2).wrap(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models
    )
    for step in range(5):
        if step == 3:
            first, second = (handle.strategy.matrices for handle in (one, other))  # type: ignore[attr-defined]
            save_exchange(first, models[0], folder)
            models[1].load_state_dict(models[0].state_dict())
            assert load_exchange(second, models[1], folder)
        for handle, model in zip((one, other), models, strict=True):
            if handle is one or step >= 3:
                handle.backward(loss_of(model, ranks, step))
                handle.step()
    return all(torch.equal(weights(models[0])[n], w) for n, w in weights(models[1]).items())


@pytest.mark.ranks
def test_what_a_wrapped_loop_owes_is_saved_and_taken_up(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed, tmp_path) == [True, True]


@each_method
def test_alone_it_is_a_plain_loop(method: MatrixMethod) -> None:
    with pytest.warns(UserWarning, match="there is one rank, and nothing travels"):
        ours, theirs = by_wrap(Ranks(), method), small()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(theirs, Ranks(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(ours[name], weight) for name, weight in weights(theirs).items())


def said(act: Any) -> str:
    with pytest.raises(InputError) as refusal:
        act()
    return str(refusal.value)


def wrapping(model: nn.Module, **fields: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return said(lambda: PowerSGD(rank=2).wrap(model, optimizer, **fields))


def refused(ranks: Ranks) -> list[str]:
    halves, cut = small(), small()
    if not ranks.first:
        halves = halves[:2]
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size))
    strategy.cut(cut, [cut[0]], torch.device("cpu"))
    return [
        wrapping(nn.parallel.DistributedDataParallel(small())),
        wrapping(cut),
        wrapping(halves),
        wrapping(small(), reduction="sum" if ranks.first else "mean"),
        wrapping(small(), seed=ranks.rank),
    ]


@pytest.mark.ranks
def test_what_is_no_replica_or_another_one_is_refused_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(refused)
    assert one == other
    ddp, sharded, model, means, seeds = one
    assert "sums gradients itself; give the model inside" in ddp
    assert sharded.startswith("0.weight: a sharded weight's gradient")
    assert "rank 1 has another model than rank 0: 2.weight is float32 [11, 19]" in model
    assert "rank 1 has another strategy than rank 0: mean is False there and True here" in means
    assert "seed is 0 there and 1 here" in seeds


@pytest.mark.parametrize("method", [DeAR(), SDP4Bit()], ids=lambda method: method.info.name)
def test_methods_that_are_no_hooks_say_why_and_what_is(method: Any) -> None:
    for asked in (lambda: method.ddp_hook(small(), seed=1), lambda: method.callback(None)):
        words = said(asked)
        assert "a hook of DistributedDataParallel" in words
        assert "DenseSums, PowerSGD or ACPSGD, which have hooks" in words
        assert ("call wrap(" if isinstance(method, DeAR) else "modicum.parallel.Zero") in words


def test_sdp4bit_wraps_no_replicas() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "modicum.parallel.Zero" in said(lambda: SDP4Bit().wrap(model, optimizer))


WRAPPED = [DenseSums(), PowerSGD(rank=2), ACPSGD(rank=2), DeAR()]
each_wrapped = pytest.mark.parametrize("method", WRAPPED, ids=lambda method: method.info.name)


def by_other_ways(ranks: Ranks, method: Any) -> list[float]:
    """The weights' largest differences between ranks, of updates made in unusual ways."""
    model = small()
    handle = method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        handle.backward(loss_of(model, ranks, step))
        handle.step()
    for step in range(3, 6):
        loss_of(model, ranks, step).backward()  # not by the handle
        handle.step()
    for step in range(6, 9):
        if ranks.first:  # who alone has rows
            handle.backward(loss_of(model, ranks, step))
        handle.step()
    handle.flush()
    own = nn.utils.parameters_to_vector(model.parameters()).tolist()
    first = ranks.broadcast(own)
    return [abs(a - b) for a, b in zip(own, first, strict=True)]


@pytest.mark.ranks
@each_wrapped
def test_ranks_stay_alike_whoever_had_a_backward_pass(pool: Pool, method: Any) -> None:
    assert all(max(found) == 0 for found in pool.run(by_other_ways, method))


def of_a_part(ranks: Ranks, method: Any) -> list[float]:
    """The optimizer has the last layer alone, and nobody freezes the first."""
    model = small()
    handle = method.wrap(model, torch.optim.SGD(model[2].parameters(), lr=1e-3))
    norms = []
    for _ in range(6):
        for last in (False, True):
            handle.backward(loss_of(model, ranks, 0), last=last)
        handle.step()
        norms.append(0.0 if (found := model[0].weight.grad) is None else float(found.norm()))
    return norms


@pytest.mark.ranks
@each_wrapped
def test_sums_that_no_optimizer_clears_are_not_added_to(pool: Pool, method: Any) -> None:
    for norms in pool.run(of_a_part, method):
        assert max(norms[3:]) <= 2 * max(norms[:3])  # they were doubled in every update


def unfrozen(ranks: Ranks, method: Any) -> str:
    model = small()
    model[0].weight.requires_grad_(False)
    handle = method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.backward(loss_of(model, ranks, 0))
    handle.step()
    handle.flush()
    model[0].weight.requires_grad_(True)
    handle.backward(loss_of(model, ranks, 1))
    words = said(handle.step)
    handle = method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))  # as it says
    before = model[0].weight.detach().clone()
    handle.backward(loss_of(model, ranks, 2))
    handle.step()
    handle.flush()
    assert not torch.equal(before, model[0].weight)
    return words


@pytest.mark.ranks
@each_wrapped
def test_what_is_unfrozen_after_it_was_wrapped_is_refused(pool: Pool, method: Any) -> None:
    for words in pool.run(unfrozen, method):
        assert "were frozen when the model was wrapped" in words
        assert "[19, 13]" in words


def of_two_kinds(ranks: Ranks) -> str:
    model = small()
    method: Any = DeAR() if ranks.first else PowerSGD(rank=2)
    return said(lambda: method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.ranks
def test_a_schedule_and_an_exchange_do_not_meet(pool: Pool) -> None:
    one, other = pool.run(of_two_kinds)
    assert one == other
    assert "rank 1 has another exchange than rank 0: kind is DeAR there and Power" in one


def of_sparse(ranks: Ranks, method: Any) -> str:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    handle = method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return said(lambda: (handle.backward(model(torch.tensor([1])).sum()), handle.step()))


@pytest.mark.ranks
@each_wrapped
def test_sparse_gradients_are_refused(pool: Pool, method: Any) -> None:
    assert all("its gradient is sparse" in words for words in pool.run(of_sparse, method))


def owed_by_all(ranks: Ranks, folder: Path, reduction: str, saves: bool) -> dict[str, float]:
    """What is owed of a gradient as it is applied, which some ranks save and others take up."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = ACPSGD(rank=1).wrap(model, optimizer, reduction=reduction)  # type: ignore[arg-type]
    matrices = exchange.strategy.matrices  # type: ignore[attr-defined]
    if saves:
        exchange.backward(loss_of(model, ranks, 0))
        exchange.step()
        save_file(model.state_dict(), folder / f"model {ranks.rank}.safetensors")
        save_exchange(matrices, model, folder)
    else:
        model.load_state_dict(load_file(folder / "model 0.safetensors"))
        assert load_exchange(matrices, model, folder)
    owed = {name: float(value.norm()) for name, value in _sums(ranks, matrices).items()}
    return {name: size / (ranks.size if reduction == "mean" else 1) for name, size in owed.items()}


def _sums(ranks: Ranks, matrices: Any) -> dict[str, Tensor]:
    own = {name: value.tolist() for name, value in matrices.owed().items() if "@" not in name}
    everybody = ranks.gather(own)
    return {name: sum(torch.tensor(each[name]) for each in everybody) for name in own}  # type: ignore[misc]


@pytest.mark.ranks
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_owed_of_an_update_stays_where_ranks_are_fewer(
    pool: Pool, tmp_path: Path, reduction: str
) -> None:
    before = pool.run(owed_by_all, tmp_path, reduction, True, ranks=4)[0]
    assert min(before.values()) > 0
    found = pool.run(owed_by_all, tmp_path, reduction, False)[0]
    assert found == pytest.approx(before, rel=1e-5)


@pytest.mark.ranks
def test_a_wrapped_model_has_copies_that_update_nothing(pool: Pool) -> None:
    assert pool.run(copied) == [True, True]


def copied(ranks: Ranks) -> bool:
    model = small()
    handle = DeAR().wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        handle.backward(loss_of(model, ranks, step))
        handle.step()
    before = weights(model)  # of which an update is due
    other = copy.deepcopy(model)
    other(torch.ones(1, 13))
    untouched = all(torch.equal(before[name], weight) for name, weight in weights(model).items())
    handle.flush()
    return untouched and not torch.equal(before["0.weight"], model[0].weight)
