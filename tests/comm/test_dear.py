"""DeAR against plain data parallelism: the same weights, the same bytes, the same checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.comm import DeAR, ScheduleQuery, Wrapped
from modicum.comm.deferred import Deferred
from modicum.core.contracts.parameters import optimizer_groups, trainable
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.parallel.replicated import Replicated

STEPS = 20
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
CONFIG = ModelConfig(
    vocabulary_size=53, width=18, layers=2, heads=3, mlp_width=31, tied_embeddings=True
)
SMALL = DeAR(layers=1)
Weights = dict[str, Tensor]


def odd(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of sizes that no number of ranks divides, one of them frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 13),
        nn.Tanh(),
        nn.Linear(13, 13),
        nn.LayerNorm(13),
        nn.Linear(13, 3, bias=False),
    )
    model[2].requires_grad_(False)
    return model.to(dtype)


def inputs(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 7, generator=generator).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def weights(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def furthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def trained(
    ranks: Ranks,
    method: DeAR,
    kind: str = "adamw",
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> tuple[Weights, Wrapped]:
    model = odd(dtype)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    handle = method.wrap(model, optimizer)
    for step in range(steps):
        handle.backward(loss_of(model, inputs(step, ranks.rank, dtype)))
        handle.step(clip)
    handle.flush()
    return weights(model), handle


def with_ddp(ranks: Ranks, kind: str, clip: float | None = None) -> Weights:
    model = odd()
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    replica = DistributedDataParallel(model)
    for step in range(STEPS):
        loss_of(replica, inputs(step, ranks.rank)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def against_ddp(ranks: Ranks, kind: str, clip: float | None) -> tuple[Weights, float, Any, Any]:
    ours, handle = trained(ranks, SMALL, kind, clip)
    strategy = handle.strategy
    assert isinstance(strategy, Deferred)
    meter = strategy.collectives.meter
    return ours, furthest(ours, with_ddp(ranks, kind, clip)), dict(meter.bytes), dict(meter.calls)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_and_bytes_are_those_of_ddp(pool: Pool, kind: str, ranks: int) -> None:
    results = pool.run(against_ddp, kind, None, ranks=ranks)
    # Gradients and one flag a parameter, up to a multiple of the ranks, of the trained layers.
    sizes = [7 * 13 + 13 + 2, 2 * 13 + 2, 3 * 13 + 1]
    padded = sum(-(-size // ranks) * ranks for size in sizes)
    half = STEPS * (ranks - 1) * 4 * padded // ranks
    for found, distance, sent, calls in results:
        assert distance <= 1e-6
        assert all(torch.equal(found[name], results[0][0][name]) for name in found)
        assert sent == {"reduce_scatter": half, "all_gather": half}
        assert calls == {"reduce_scatter": 3 * STEPS, "all_gather": 3 * STEPS}


@pytest.mark.ranks
def test_clipped_weights_are_those_of_ddp(pool: Pool) -> None:
    for _, distance, sent, _ in pool.run(against_ddp, "adamw", 0.3, ranks=4):
        assert distance <= 1e-6
        assert sent["all_gather"] - sent["reduce_scatter"] == STEPS * 3 * 8  # the norm: one fp64


def with_other_groups(ranks: Ranks) -> list[Any]:
    found = []
    for method in (SMALL, DeAR(layers=2), DeAR(), DeAR(tune=True)):
        result, handle = trained(ranks, method, "adamw", 0.3, steps=60)
        found.append((result, len(handle.strategy.groups)))  # type: ignore[attr-defined]
        if method.tune:
            tuner = handle.strategy._tuner  # type: ignore[attr-defined]
            found.append((tuner.done, len(set(tuner._tried))))
    return found


@pytest.mark.ranks
def test_groups_of_any_size_give_the_same_weights_to_the_bit(pool: Pool) -> None:
    for one, two, default, tuned, (done, tried) in pool.run(with_other_groups, ranks=4):
        assert [each[1] for each in (one, two, default)] == [3, 2, 1]
        for other in (two, default, tuned):
            assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        assert done
        assert tried > 2


# The strategy, as the trainer calls it


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, CONFIG.vocabulary_size, (8, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:4, :9] = -100  # so that ranks have unequal counts
    return ids[:, :-1].contiguous(), labels


class Loop:
    """A few lines of the trainer: sums over ranks, micro-batches, clipping, a learning rate."""

    def __init__(self, strategy: Strategy, recompute: bool = True) -> None:
        self.strategy, self.ranks, self.model = strategy, strategy.ranks, create(CONFIG, seed=0)
        self.model.recompute = recompute
        strategy.start(self.model)
        groups = optimizer_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups)
        self.registry = StateRegistry()
        strategy.register(self.registry, self.model)
        self.registry.add_view(optimizer_view(self.optimizer))

    def step(self, number: int, clip: float = 0.5) -> tuple[float, float]:
        ids, labels = (part.chunk(self.ranks.size)[self.ranks.rank] for part in rows(number))
        tokens = self.ranks.sum(float((labels != -100).sum()))[0]
        total = 0.0
        for row in range(len(ids)):
            loss = self.loss(ids[row : row + 1], labels[row : row + 1]) / tokens
            self.strategy.before_backward(last=row == len(ids) - 1)
            loss.backward()
            total += float(loss.detach())
        self.strategy.after_backward()
        parameters = [p for _, p in self.strategy.trained(self.model)]
        norm = self.strategy.norm(parameters)
        self.strategy.clip(parameters, clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_learning_rate"] * (1 - number / 20)
        if math.isfinite(norm):
            self.strategy.update(self.optimizer)
        else:
            self.strategy.discard()
        for group in self.optimizer.param_groups:
            group["lr"] = math.nan  # whoever reads it later reads the wrong one
        self.optimizer.zero_grad(set_to_none=True)
        return self.ranks.sum(total)[0], float(norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.strategy.flush()
        return float(self.loss(*rows(99)))

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(ids).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def state(self) -> dict[str, Any]:
        self.strategy.flush()
        return {
            view: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            for view, values in self.registry.read().items()
        }


def strategy_of(ranks: Ranks, kind: str) -> Strategy:
    layout = Layout.of(ranks.size)
    if kind == "ddp":
        return Replicated(ranks, layout, bucket_bytes=4000)
    return DeAR(bucket_bytes=4000).strategy(ranks, layout)


def looped(ranks: Ranks, kind: str, evaluate: bool = True) -> Any:
    loop = Loop(strategy_of(ranks, kind))
    figures = []
    for step in range(6):
        figures.append(loop.step(step))
        if step % 2 and evaluate:
            figures.append((loop.evaluate(), 0.0))
    return figures, loop.state()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_accumulated_clipped_recomputed_tied_updates_are_those_of_replicas(
    pool: Pool, ranks: int
) -> None:
    theirs, their_state = pool.run(looped, "ddp", ranks=ranks)[0]
    results = pool.run(looped, "dear", ranks=ranks)
    for ours, state in results:
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert state.keys() == their_state.keys()
        for view in state:
            assert list(state[view]) == list(their_state[view])
            for key, value in state[view].items():
                torch.testing.assert_close(value, their_state[view][key], rtol=1e-3, atol=1e-4)
                assert torch.equal(value, results[0][1][view][key])
    quiet = pool.run(looped, "dear", False, ranks=ranks)[0][1]
    same = [
        torch.equal(value, quiet["model"][key]) for key, value in results[0][1]["model"].items()
    ]
    assert all(same)  # evaluations in between change nothing


def resumed(ranks: Ranks) -> list[bool]:
    whole = Loop(strategy_of(ranks, "dear"))
    first = Loop(strategy_of(ranks, "dear"))
    for step in range(3):
        whole.step(step)
        first.step(step)
    saved = first.state()
    again, replicas = Loop(strategy_of(ranks, "dear")), Loop(strategy_of(ranks, "ddp"))
    again.registry.write(saved)
    replicas.registry.write(saved)
    for step in range(3, 6):
        for loop in (whole, again, replicas):
            loop.step(step)
    one, two, three = (loop.state() for loop in (whole, again, replicas))
    close = [
        torch.allclose(value, three[view][key], rtol=1e-3, atol=1e-4)
        for view in one
        for key, value in one[view].items()
    ]
    return [torch.equal(v, two[view][key]) for view in one for key, v in one[view].items()] + close


@pytest.mark.ranks
def test_a_resumed_run_is_the_same_to_the_bit_and_replicas_go_on_with_it(pool: Pool) -> None:
    results = pool.run(resumed, ranks=4)
    assert len(results[0]) > 100
    assert all(all(result) for result in results)


def in_bf16(ranks: Ranks) -> tuple[Weights, Weights]:
    ours, _ = trained(ranks, SMALL, "momentum", dtype=torch.bfloat16)
    model, strategy = odd(torch.bfloat16), Replicated(ranks, Layout.of(ranks.size))
    strategy.start(model)
    optimizer = OPTIMIZERS["momentum"](p for _, p in trainable(model))
    for step in range(STEPS):
        loss = loss_of(model, inputs(step, ranks.rank, torch.bfloat16)) / ranks.size
        strategy.before_backward(last=True)
        loss.backward()
        strategy.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, weights(model)


@pytest.mark.ranks
def test_bf16_weights_are_those_of_replicas(pool: Pool) -> None:
    for ours, theirs in pool.run(in_bf16):  # a sum of two is the same in any order
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Routed(nn.Module):
    """One of its layers is used by rank 0 alone, in other steps by nobody; one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = self.layers[2](x)
        if step % 3 == 1:
            x = self.layers[0](x)
        return self.layers[1](x) if rank == 0 else x


def routed(ranks: Ranks, kind: str) -> Any:
    model = Routed()
    layout = Layout.of(ranks.size)
    strategy = SMALL.strategy(ranks, layout) if kind == "dear" else Replicated(ranks, layout)
    strategy.start(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(7):
        loss = model(torch.ones(2, 5), ranks.rank, step).square().sum()
        strategy.before_backward(last=True)
        loss.backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()
    strategy.flush()
    counts = [
        float(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in model.parameters()
    ]
    return weights(model), counts


@pytest.mark.ranks
def test_layers_that_some_or_no_ranks_use_are_updated_as_with_replicas(pool: Pool) -> None:
    theirs, their_counts = pool.run(routed, "ddp")[0]
    assert their_counts == [2, 2, 7, 7, 7, 7, 0, 0]
    for ours, counts in pool.run(routed, "dear"):
        assert counts == their_counts
        assert furthest(ours, theirs) <= 1e-6


# One process


def alone(model: nn.Module, **fields: Any) -> tuple[Wrapped, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return DeAR(**fields).wrap(model, optimizer), optimizer


class Attention(nn.Module):
    """PyTorch's attention reads its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.attention(x, x, x)[0] * self.scale)


@pytest.mark.parametrize("fields", [{}, {"layers": 1}])
def test_weights_that_another_module_reads_are_updated_before_it_does(
    fields: dict[str, Any],
) -> None:
    model, plain = Attention(), Attention()
    handle, _ = alone(model, **fields)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(6):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
        handle.backward(model(x).square().mean())
        handle.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    assert furthest(weights(model), weights(plain)) == 0


def test_a_stale_weight_that_gets_a_gradient_is_an_error() -> None:
    model = odd()
    handle, _ = alone(model)
    decay = lambda: model[0].bias.square().sum()  # noqa: E731
    handle.backward(loss_of(model, inputs(0, 0)))
    handle.step()
    with pytest.raises(RuntimeError, match=r"used before it was updated|inplace operation"):
        handle.backward(decay())
    handle.flush()
    handle.backward(decay())
    handle.step()


def test_the_forward_sees_new_weights_without_a_flush_also_in_inference_mode() -> None:
    model, plain = odd(), odd()
    handle, optimizer = alone(model, layers=1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        x = inputs(step, 0)
        handle.backward(loss_of(model, x))
        before = weights(model)
        handle.step()
        assert furthest(weights(model), before) == 0
        assert all(p.grad is None for p in model.parameters())
        loss_of(plain, x).backward()
        theirs.step()
        theirs.zero_grad()
        with torch.inference_mode():
            assert torch.equal(model(x), plain(x))
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
    assert not any(v.is_inference() for s in optimizer.state.values() for v in s.values())


def test_an_update_that_is_not_finite_is_passed_over() -> None:
    model = odd()
    handle, optimizer = alone(model)
    before = weights(model)
    handle.backward(loss_of(model, inputs(0, 0)) * math.inf)
    norm = handle.step(clip_norm=1.0)
    handle.flush()
    assert norm is not None
    assert not math.isfinite(norm)
    assert furthest(weights(model), before) == 0
    assert not optimizer.state
    handle.backward(loss_of(model, inputs(0, 0)))
    handle.step()
    handle.flush()
    assert furthest(weights(model), before) > 0


def test_a_schedulers_rates_are_those_at_the_step() -> None:
    model, plain = odd(), odd()
    handle, optimizer = alone(model, layers=1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    rates = [
        torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.5) for each in (optimizer, theirs)
    ]
    for step in range(4):
        handle.backward(loss_of(model, inputs(step, 0)), last=False)
        handle.backward(loss_of(model, inputs(step, 1)))
        handle.step()
        loss_of(plain, inputs(step, 0)).backward()
        loss_of(plain, inputs(step, 1)).backward()
        theirs.step()
        theirs.zero_grad()
        for rate in rates:
            rate.step()
    handle.flush()
    assert furthest(weights(model), weights(plain)) == 0


def test_groups_follow_the_order_of_use_once_it_is_known() -> None:
    model = Routed()
    handle, _ = alone(model, layers=1)
    for step in range(2):
        handle.backward(model(torch.ones(2, 5), 0, 1).sum())
        handle.step()
        strategy = handle.strategy
        assert isinstance(strategy, Deferred)
        order = [
            next(i for i, m in enumerate(model.layers) if m.weight is group.parameters[0])
            for group in strategy.groups
        ]
        assert order == ([0, 1, 2, 3] if step == 0 else [2, 0, 1, 3])


def test_the_ledgers_traffic_is_the_meters() -> None:
    method = DeAR(bucket_bytes=300)
    layers = ((91, 13), (13, 13), (39,))
    for ranks in (1, 2, 3, 8):
        ledger = method.ledger(ScheduleQuery(layers, ranks))
        buffers = [-(-106 // ranks) * ranks, -(-(13 + 13 + 39 + 3) // ranks) * ranks]
        sent = 4 * sum(buffers) * (ranks - 1) // ranks
        assert [(w.collective, w.bytes, w.count) for w in ledger.wire] == [
            ("reduce_scatter", sent, 2),
            ("all_gather", sent, 2),
        ]
        assert ledger.bytes("gradient", "forward") == 4 * sum(buffers)
        assert ledger.bytes("gradient", "step") == 4 * (sum(buffers) - 169)


def test_one_group_is_sent_when_the_backward_pass_is_over() -> None:
    layers = ((91, 13), (13, 13), (39,))
    one, two = (DeAR(bucket_bytes=size).ledger(ScheduleQuery(layers, 2)) for size in (10_000, 300))
    assert (one.bytes("workspace", "backward"), two.bytes("workspace", "step")) == (0, 2 * 174)
    assert one.bytes("workspace", "step") == 4 * 174 + 2 * 174
    assert two.bytes("workspace", "backward") == 2 * 4 * 106


def test_sharded_weights_and_gradients_within_the_backward_are_refused() -> None:
    with pytest.raises(InputError, match=r"parallel\.strategy"):
        DeAR().strategy(Ranks(), Layout(shards=2))
    strategy = DeAR().strategy(Ranks(), Layout())
    with pytest.raises(InputError, match="after the backward pass"):
        strategy.when_ready(odd(), lambda parameter: None)
    with pytest.raises(InputError, match="leave one of them out"):
        DeAR(layers=2, tune=True)
    with pytest.raises(InputError, match="bucket_bytes"):
        DeAR(bucket_bytes=0)


def test_a_hugging_face_model_in_a_loop_of_ones_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=29,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    found = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = DeAR(layers=2).wrap(model, optimizer) if wrapped else None
        for step in range(4):
            ids = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(step))
            loss = model(ids, labels=ids).loss
            if handle is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                handle.backward(loss)
                handle.step()
        if handle is not None:
            handle.flush()
        found.append(weights(model))
    assert furthest(*found) == 0
