"""DeAR against PyTorch's data parallelism: the same weights and bytes, however it groups layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.comm import DeAR
from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.planner.choose import layouts
from modicum.proofs.contracts.comm.subjects import NamedWeights, furthest, weights
from modicum.proofs.contracts.optim.subjects import numbers
from modicum.recipe import Recipe

STEPS, SMALL = 20, DeAR(layers=1)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def odd() -> nn.Module:
    """Layers of sizes that no number of ranks divides, one of them frozen."""
    torch.manual_seed(0)
    frozen, last = nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 3, bias=False)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), frozen, nn.LayerNorm(13), last)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = numbers(5, 7, name=f"step {step}, rank {rank}")
    return (model(x) - x[:, :3].sin()).square().mean()


def with_dear(
    ranks: Ranks, method: DeAR, kind: str, clip: float | None, steps: int = STEPS
) -> tuple[NamedWeights, Any]:
    """The weights after some steps, and DeAR's strategy."""
    model = odd()
    handle = method.wrap(model, OPTIMIZERS[kind](p for _, p in trainable(model)))
    for step in range(steps):
        handle.backward(loss_of(model, step, ranks.rank))
        handle.step(clip)
    handle.flush()
    return weights(model), handle.strategy


def with_ddp(ranks: Ranks, kind: str, clip: float | None) -> NamedWeights:
    model = odd()
    optimizer = OPTIMIZERS[kind](p for _, p in trainable(model))
    replica = DistributedDataParallel(model)
    for step in range(STEPS):
        loss_of(replica, step, ranks.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def against_ddp(ranks: Ranks, kind: str, clip: float | None) -> Any:
    ours, strategy = with_dear(ranks, SMALL, kind, clip)
    meter = strategy.collectives.meter
    return ours, furthest(ours, with_ddp(ranks, kind, clip)), dict(meter.bytes), dict(meter.calls)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "clip"), [("sgd", None), ("momentum", None), ("adamw", None), ("momentum", 0.3)]
)
def test_weights_and_bytes_are_those_of_ddp(
    pool: Pool, kind: str, clip: float | None, ranks: int
) -> None:
    # Gradients and one flag a parameter, up to a multiple of the ranks, of the trained layers.
    parts = [-(-size // ranks) for size in (7 * 13 + 13 + 2, 2 * 13 + 2, 3 * 13 + 1)]
    sent = STEPS * (ranks - 1) * 4 * sum(parts)
    norms = 0 if clip is None else STEPS  # one number of fp64 each
    results = pool.run(against_ddp, kind, clip, ranks=ranks)
    for found, distance, nbytes, calls in results:
        assert distance <= 1e-6
        assert furthest(found, results[0][0]) == 0
        assert nbytes == {"reduce_scatter": sent, "all_gather": sent + norms * 8 * (ranks - 1)}
        assert calls == {"reduce_scatter": 3 * STEPS, "all_gather": 3 * STEPS + norms}


RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01


def small() -> nn.Sequential:
    """Matrices and vectors whose sizes no number of ranks divides, in fp64."""
    torch.manual_seed(0)
    layers = nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def loss_in_fp64(prediction: Tensor, x: Tensor) -> Tensor:
    return (prediction - x[:, :3].sin()).square().mean()


def samples(step: int, rank: int) -> Tensor:
    return numbers(5, 7, name=f"step {step}, rank {rank}").double()


def written_out(count: int, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The authors' steps, all ranks at once: by step and layer the weights that rank 0 uses.

    Then the last ones, by the update that their code never makes.
    """
    layers = list(small())
    weights = [[[p.detach().clone() for p in layer.parameters()] for layer in layers]
               for _ in range(count)]  # fmt: skip
    momenta = [[[torch.zeros_like(w) for w in each] for each in one] for one in weights]
    shards: dict[int, list[Tensor]] = {}

    def update(number: int) -> None:
        """Just before a layer is used: gather, and step it, on every rank."""
        if not weights[0][number] or not shards:
            return
        gathered = torch.cat(shards[number]) / count
        for own, momentum in zip(weights, momenta, strict=True):
            sizes = [w.numel() for w in own[number]]
            parts = gathered[: sum(sizes)].split(sizes)
            for w, m, part in zip(own[number], momentum[number], parts, strict=True):
                m.mul_(MOMENTUM).add_(part.view_as(w) + DECAY * w)
                w.sub_(RATE * m)

    used = []
    for step in range(steps):
        used.append([])
        outputs = [samples(step, rank) for rank in range(count)]
        leaves = [[[] for _ in layers] for _ in range(count)]
        for number, layer in enumerate(layers):
            update(number)
            used[-1] += [w.clone() for w in weights[0][number]]
            names = [name for name, _ in layer.named_parameters()]
            for rank in range(count):
                own = [w.clone().requires_grad_() for w in weights[rank][number]]
                leaves[rank][number] = own
                values = dict(zip(names, own, strict=True))
                outputs[rank] = torch.func.functional_call(layer, values, (outputs[rank],))
        losses = [loss_in_fp64(out, samples(step, rank)) for rank, out in enumerate(outputs)]
        for number in reversed([n for n, each in enumerate(weights[0]) if each]):
            rows = []
            for rank in range(count):
                own = torch.autograd.grad(losses[rank], leaves[rank][number], retain_graph=True)
                flat = torch.cat([gradient.flatten() for gradient in own])
                padding = flat.new_zeros(-len(flat) % count)
                rows.append(torch.cat([flat, padding]).view(count, -1))
            shards[number] = list(torch.stack(rows).sum(0))  # each rank keeps a row of the sums
    for number in range(len(layers)):
        update(number)
    return used, [w for each in weights[0] for w in each]


def by_ours(ranks: Ranks, method: DeAR, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    model, used = small(), list[list[Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    for layer in model:
        layer.register_forward_hook(
            lambda layer, _, __: used[-1].extend(w.detach().clone() for w in layer.parameters())
        )
    handle = method.wrap(model, optimizer)
    for step in range(steps):
        used.append([])
        x = samples(step, ranks.rank)
        handle.backward(loss_in_fp64(model(x), x))
        handle.step()
    handle.flush()
    return used, [w.detach() for w in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("method", [SMALL, DeAR()], ids=["a layer", "all layers"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_are_those_of_the_authors_steps_in_fp64(
    pool: Pool, method: DeAR, ranks: int
) -> None:
    used, last = written_out(ranks, STEPS)
    for ours, our_last in pool.run(by_ours, method, STEPS, ranks=ranks):
        for mine, its in zip([*ours, our_last], [*used, last], strict=True):
            assert max(float((a - b).abs().max()) for a, b in zip(mine, its, strict=True)) < 1e-10
    assert max(float((a - b).abs().max()) for a, b in zip(used[0], last, strict=True)) > 0.01


def with_other_groups(ranks: Ranks) -> Any:
    methods = (SMALL, DeAR(layers=2), DeAR(), DeAR(tune=True))
    found = [with_dear(ranks, method, "momentum", 0.3, steps=60) for method in methods]
    tuner = found[3][1]._tuner
    groups = [len(strategy.groups) for _, strategy in found[:3]]
    return [furthest(found[0][0], other) for other, _ in found], groups, tuner.done, tuner._tried


@pytest.mark.ranks
def test_groups_of_any_size_give_the_same_weights_to_the_bit(pool: Pool) -> None:
    for far, groups, done, tried in pool.run(with_other_groups, ranks=4):
        assert (far, groups, done) == ([0, 0, 0, 0], [3, 2, 1], True)
        assert len(set(tried)) > 2


def test_sharded_weights_and_gradients_within_the_backward_are_refused() -> None:
    with pytest.raises(InputError, match=r"or the optimizer's state; .*strategy to ddp"):
        SMALL.strategy(Ranks(), Layout(shards=2))
    for strategy in ("zero", "fsdp"):
        recipe = Recipe(comm={"method": "dear"}, parallel={"strategy": strategy})
        with pytest.raises(InputError, match=r"zero and fsdp sum for each rank its part alone"):
            layouts(recipe, 2)
    with pytest.raises(InputError, match="after the backward pass"):
        SMALL.strategy(Ranks(), Layout()).when_ready(odd(), lambda parameter: None)
    for made, field in (
        (lambda _: DeAR(layers=2, tune=True), "layers"),
        (Recipe(comm={"method": "dear", "layers": 2, "tune": True}).method, "comm.layers"),
    ):
        with pytest.raises(InputError, match="leave one of them out") as caught:
            made("comm")
        assert (caught.value.field, caught.value.value) == (field, 2)
