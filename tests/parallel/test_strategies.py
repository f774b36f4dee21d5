"""Each way to share the work against the same updates in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from torch import nn
from torch.utils.checkpoint import checkpoint

from modicum.adapters import LoRA
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.bucketed import cut
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part, whole
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.tasks import CausalLM

pytestmark = pytest.mark.ranks
# Rows, widths and heads that no number of ranks divides.
CONFIG = ModelConfig(
    vocabulary_size=53, width=18, layers=2, heads=3, mlp_width=31, tied_embeddings=True
)
STEPS, BATCH, MICRO = 4, 8, 1


def built(strategy: Strategy, *, lora: bool, recompute: bool) -> Llama:
    with on_meta():
        model = Llama(CONFIG)
        adapter = LoRA(rank=3).attach(model, seed=1) if lora else None
    model.recompute = recompute
    strategy.cut(model, model.model.layers, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    if adapter is not None:
        adapter.initialise()
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):  # else the first gradients of A are zero
                own_part(parameter.detach())[0].add_(0.01)
    strategy.start(model)
    return model


def rows(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, CONFIG.vocabulary_size, (BATCH, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:4, :9] = -100  # so that ranks have unequal counts
    return Batch(ids[:, :-1].contiguous(), labels)


def strategy_of(ranks: Ranks, kind: str) -> Strategy:
    if kind == "ddp":
        return Replicated(ranks, Layout.of(ranks.size), bucket_bytes=4000)
    shard = ranks.size if kind == "fsdp" else 2
    return Sharded(ranks, Layout.of(ranks.size, shard), reshard_after_forward=kind != "fsdp")


def trained(strategy: Strategy, **options: Any) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and final weights of a few accumulated, clipped AdamW updates."""
    ranks, task = strategy.ranks, CausalLM()
    model = built(strategy, **options)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    losses, norms = [], []
    share = BATCH // ranks.size
    for step in range(STEPS):
        batch = rows(step)
        mine = Batch(batch.input_ids, batch.labels).split(share)[ranks.rank].split(MICRO)
        tokens = ranks.sum(sum(part.count for part in mine))[0]
        total = 0.0
        for place, part in enumerate(mine):
            loss = task.loss_sum(model, part) / tokens
            strategy.before_backward(last=place == len(mine) - 1)
            loss.backward()
            total += float(loss.detach())
        strategy.after_backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if p.requires_grad], 1.0
        )
        losses.append(ranks.sum(total)[0])
        norms.append(float(whole(norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        task.loss_sum(model, rows(99))
    strategy.rest(model)
    return losses, norms, {n: whole(p.detach()).clone() for n, p in model.named_parameters()}


def on_ranks(ranks: Ranks, kind: str, options: dict[str, Any]) -> Any:
    return trained(strategy_of(ranks, kind), **options)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("kind", "ranks", "recompute"),
    [
        ("ddp", 2, False),
        ("ddp", 4, True),
        ("fsdp", 2, True),
        ("fsdp", 4, False),
        ("hybrid", 4, True),
    ],
)
def test_updates_are_those_of_one_process(
    pool: Pool, kind: str, ranks: int, recompute: bool, lora: bool
) -> None:
    options = {"lora": lora, "recompute": recompute}
    losses, norms, weights = trained(Strategy(), **options)
    results = pool.run(on_ranks, kind, options, ranks=ranks)
    for their_losses, their_norms, their_weights in results:
        assert their_losses == pytest.approx(losses, rel=1e-5)
        assert their_norms == pytest.approx(norms, rel=1e-4)
        assert their_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(their_weights[name], weight, rtol=1e-3, atol=1e-4)
            # Whatever the rounding, ranks agree to the bit.
            assert torch.equal(their_weights[name], results[0][2][name])


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 4), ("fsdp", 4)])
def test_the_same_updates_again_are_the_same_to_the_bit(pool: Pool, kind: str, ranks: int) -> None:
    options = {"lora": False, "recompute": False}
    once, again = (pool.run(on_ranks, kind, options, ranks=ranks)[0] for _ in range(2))
    assert once[:2] == again[:2]
    assert all(torch.equal(weight, again[2][name]) for name, weight in once[2].items())


class Routed(nn.Module):
    """One of its three layers is used by rank 0 alone, one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if rank == 0 else x


def unused(ranks: Ranks) -> dict[str, Any]:
    strategy, model = Replicated(ranks, Layout.of(ranks.size), bucket_bytes=100), Routed()
    strategy.start(model)
    strategy.before_backward(last=True)
    model(torch.ones(2, 5), ranks.rank).sum().backward()
    strategy.after_backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_of_what_only_some_ranks_use(pool: Pool) -> None:
    zero, one = pool.run(unused)
    reference = Routed()
    for rank in range(2):
        reference(torch.ones(2, 5), rank).sum().backward()
    for name, parameter in reference.named_parameters():
        if name.startswith("layers.2"):
            assert zero[name] is None
            assert one[name] is None
        else:
            torch.testing.assert_close(zero[name], parameter.grad)
            assert torch.equal(zero[name], one[name])


class Chosen(nn.Module):
    """Of three equal layers even ranks use the first, odd ones the second, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return (rank + 1) * self.layers[rank % 2](x)


def of_chosen(ranks: Ranks, shards: int) -> dict[str, Any]:
    strategy, model = Sharded(ranks, Layout.of(ranks.size, shards)), Chosen()
    strategy.cut(model, [], torch.device("cpu"))
    strategy.start(model)
    strategy.before_backward(last=True)
    model(torch.ones(2, 5), ranks.rank).sum().backward()
    strategy.after_backward()
    named = model.named_parameters()
    return {name: None if p.grad is None else whole(p.grad) for name, p in named}


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 2)])
def test_shards_of_gradients_that_only_some_ranks_have(pool: Pool, ranks: int, shards: int) -> None:
    reference = Chosen()
    for rank in range(ranks):
        reference(torch.ones(2, 5), rank).sum().backward()
    for found in pool.run(of_chosen, shards, ranks=ranks):
        for name, parameter in reference.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], expected)


def starts(ranks: Ranks) -> torch.Tensor:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(ranks.rank)
    model.register_buffer("seen", torch.full((2,), float(ranks.rank)))
    Replicated(ranks, Layout.of(ranks.size)).start(model)
    return torch.cat([model.weight.detach().flatten(), model.seen])


def test_replicas_start_from_rank_0(pool: Pool) -> None:
    assert all(torch.equal(values, torch.zeros(11)) for values in pool.run(starts))


class Odd(nn.Module):
    """Weights and buffers that gloo would send other memory of, or does not know."""

    def __init__(self, value: float) -> None:
        super().__init__()
        rows = torch.full((5, 7), -1.0)  # of which a part is the model's
        rows[:, :4] = value
        self.rows = nn.Parameter(rows[:, :4])
        self.turning = nn.Parameter(torch.full((3,), complex(value, -value)))
        self.frozen = nn.Parameter(torch.full((1, 2), value).expand(3, 2), requires_grad=False)
        known: dict[str, torch.Tensor] = {
            "repeated": torch.full((1, 64), value).expand(64, 64),
            "turned": (torch.arange(6.0).view(2, 3) * value).T,
            "scalar": torch.tensor(value),
            "none": torch.empty(0, 3),
            "flags": torch.tensor([value > 1, False]),
        }
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64):
            known[str(dtype).replace(".", " ")] = torch.full((3,), value).to(dtype)
        for name, tensor in known.items():
            self.register_buffer(name, tensor)


def in_bytes(model: nn.Module) -> dict[str, list[Any]]:
    return {
        name: [str(each.dtype), *each.contiguous().flatten().view(torch.uint8).tolist()]
        for name, each in model.state_dict().items()
    }


def odd_ones(ranks: Ranks) -> tuple[dict[str, list[Any]], torch.Tensor, tuple[int, ...]]:
    model = Odd(2.0 - ranks.rank)
    strategy = Replicated(ranks, Layout.of(ranks.size))
    strategy.start(model)
    strategy.share_frozen(model)
    strategy.before_backward(last=True)
    weights = (ranks.rank + 1) * torch.full((3,), 1 + 2j)
    ((model.turning * weights).sum().real + model.rows.sum()).backward()
    strategy.after_backward()
    assert model.turning.grad is not None
    return in_bytes(model), model.turning.grad, model.get_buffer("repeated").stride()


def test_tensors_of_any_dtype_and_strides_are_shared(pool: Pool) -> None:
    for found, gradient, strides in pool.run(odd_ones):
        assert found == in_bytes(Odd(2.0))
        assert torch.equal(gradient, torch.full((3,), 3 - 6j))  # of complex weights too
        assert strides == (0, 1)


class Recomputed(nn.Module):
    """A weight that two reentrant checkpoints use, so that its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.square().sum()


def test_a_gradient_that_comes_after_its_sum_has_begun_is_refused_by_name() -> None:
    """Whether the first part has left, or lies where another would be written over it."""
    strategies: list[Strategy] = [
        Replicated(Ranks(), Layout(), bucket_bytes=1),
        Zero(Ranks(), bucket_bytes=1),
        Zero(Ranks()),
    ]
    for strategy in strategies:
        model = Recomputed()
        strategy.start(model)
        strategy.before_backward(last=True)
        with pytest.raises(InputError, match=r"layer\.(weight|bias): .*use_reentrant=False"):
            model(torch.ones(2, 4)).backward()


def test_parts_of_a_gradient_add_up_before_its_sum_has_begun() -> None:
    ours, plain = Recomputed(), Recomputed()
    plain.load_state_dict(ours.state_dict())
    strategy = Replicated(Ranks(), Layout())
    strategy.start(ours)
    strategy.before_backward(last=True)
    for model in (ours, plain):
        model(torch.ones(2, 4)).backward()
    strategy.after_backward()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


def test_a_scalar_cannot_be_sharded() -> None:
    model = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(InputError, match=r"scale: a scalar .*give it the shape \[1\]"):
        Sharded(Ranks(), Layout.of(1)).cut(model, [], torch.device("cpu"))


def test_buckets_hold_one_dtype_and_close_at_their_size() -> None:
    parameters = [nn.Parameter(torch.ones(50, dtype=torch.float32)) for _ in range(3)]
    parameters += [nn.Parameter(torch.ones(50, dtype=torch.bfloat16)) for _ in range(2)]
    found = [[(p.dtype, p.numel()) for p in group] for group in cut(parameters, 250)]
    assert found == [
        [(torch.bfloat16, 50)] * 2,
        [(torch.float32, 50)] * 2,
        [(torch.float32, 50)],
    ]


def metered(ranks: Ranks) -> tuple[int, int, int]:
    """Bytes and calls of an update of replicas, and how many numbers there are."""
    strategy = Replicated(ranks, Layout.of(ranks.size), 200)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    strategy.start(model)
    strategy.before_backward(last=True)
    model(torch.ones(2, 7)).sum().backward()
    strategy.after_backward()
    meter = strategy.engine.meter
    numbers = sum(parameter.numel() + 1 for parameter in model.parameters())  # and a flag each
    return meter.bytes["all_reduce"], meter.calls["all_reduce"], numbers


def test_replicas_are_metered(pool: Pool) -> None:
    for sent, calls, numbers in pool.run(metered, ranks=2):
        assert sent == 4 * numbers
        assert calls == 2  # a bucket is closed by each layer's weight


def sums_of_fsdp(ranks: Ranks, shards: int) -> tuple[dict[str, int], int, int]:
    """What the engines of FSDP2 send in an update, at layers whose rows ranks do not divide."""
    import torch.distributed as dist

    def unasked(*_: Any, **__: Any) -> None:
        raise AssertionError("gloo's own reduce-scatter was called")

    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    strategy = Sharded(ranks, Layout.of(ranks.size, shards))
    strategy.cut(model, list(model), torch.device("cpu"))
    strategy.start(model)
    names = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
    # The pool's processes serve other tests afterwards.
    with mock.patch.multiple(dist, create=True, **dict.fromkeys(names, unasked)):
        strategy.before_backward(last=True)
        model(torch.ones(2, 7)).sum().backward()
        strategy.after_backward()
    [engine] = strategy.engines
    rows = [-(-n // shards) * width for n, width in ((13, 7), (13, 1), (5, 13), (5, 1))]
    return dict(engine.meter.bytes), engine.meter.calls["reduce_scatter"], 4 * sum(rows)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 4), (4, 2)])
def test_fsdp_sums_by_our_reduce_scatter_which_sends_each_part_once(
    pool: Pool, ranks: int, shards: int
) -> None:
    for sent, calls, part in pool.run(sums_of_fsdp, shards, ranks=ranks):
        # Weights are gathered for the forward and for the backward pass.
        sums = (shards - 1) * part
        assert sent == {"reduce_scatter": sums, "all_gather": 2 * sums}
        assert calls == 2
