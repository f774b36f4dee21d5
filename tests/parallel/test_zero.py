"""The sharded optimizer against one process, in memory, across checkpoints, with exchanges."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from modicum.adapters import LoRA
from modicum.checkpoint import CheckpointStore
from modicum.comm import SDP4Bit
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.parameters import (
    ParameterMetadata,
    describe_parameter,
    metadata,
    trained_shapes,
)
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.stepping import Stepper
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.memory import TensorMeter, tensor_bytes
from modicum.core.ranks.exchange import ExchangeContext, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, own_part, whole
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.parallel import exchange_ledger
from modicum.parallel.buffer_rows import BufferRows
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.tasks import CausalLM

ranked = pytest.mark.ranks
# Rows, widths and heads that no number of ranks divides; vectors shorter than four ranks.
CONFIG = ModelConfig(
    vocabulary_size=53, width=18, layers=2, heads=3, mlp_width=31, tied_embeddings=True
)
BATCH, MICRO = 8, 1
# Small groups: the layers here are small.
CODED = {"weight_group": 64, "gradient_group": 32}
Weights = dict[str, Tensor]


def strategy_of(ranks: Ranks, kind: str, fields: dict[str, Any] | None = None) -> Strategy:
    """`fields`: of SDP4Bit, if that is what exchanges."""
    exchange = None if fields is None else SDP4Bit(**fields).bind(ExchangeContext(ranks, seed=3))
    whole_layout, cut_layout = Layout.of(ranks.size), Layout.of(ranks.size, ranks.size)
    if kind == "ddp":
        return Replicated(ranks, whole_layout, bucket_bytes=4000)
    if kind == "zero":
        return Zero(ranks, cut_layout, exchange, bucket_bytes=4000)
    return Sharded(ranks, cut_layout, reshard_after_forward=False, exchange=exchange)


class Training:
    """A few accumulated, clipped AdamW updates of a small decoder."""

    def __init__(
        self, strategy: Strategy, *, lora: bool = False, half: bool = False, recompute: bool = False
    ) -> None:
        self.strategy, self.ranks, self.task = strategy, strategy.ranks, CausalLM()
        with on_meta(torch.bfloat16 if half else torch.float32):
            self.model = Llama(CONFIG)
            adapter = LoRA(rank=3).attach(self.model, seed=1) if lora else None
        self.model.recompute = recompute
        strategy.cut(self.model, self.model.model.layers, torch.device("cpu"))
        materialise(self.model, "cpu")
        self.model.initialise(0)
        if adapter is not None:
            adapter.initialise()
            for name, parameter in self.model.named_parameters():
                if name.endswith(".B"):  # else the first gradients of A are zero
                    own_part(parameter.detach())[0].add_(0.01)
        strategy.start(self.model)
        trained = list(strategy.trained(self.model))
        self.parameters = [parameter for _, parameter in trained]
        group = {"params": self.parameters, "names": [name for name, _ in trained]}
        self.optimizer = torch.optim.AdamW([group], lr=1e-2, fused=True)
        self.registry = StateRegistry()
        strategy.register(self.registry, self.model)
        self.registry.add_view(optimizer_view(self.optimizer))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def steps(self, first: int, last: int, micro: int = MICRO) -> Training:
        for step in range(first, last):
            self.step(step, micro)
        return self

    def step(self, step: int, micro: int) -> None:
        share = BATCH // self.ranks.size
        mine = rows(step).split(share)[self.ranks.rank].split(micro)
        tokens = self.ranks.sum(sum(part.count for part in mine))[0]
        total = 0.0
        for place, part in enumerate(mine):
            loss = self.task.loss_sum(self.model, part) / tokens
            self.strategy.before_backward(last=place == len(mine) - 1)
            loss.backward()
            total += float(loss.detach())
        self.strategy.after_backward()
        norm = whole(self.strategy.norm(self.parameters))
        self.strategy.clip(self.parameters, 1.0, norm)
        self.losses.append(self.ranks.sum(total)[0])
        self.norms.append(float(norm))
        self.strategy.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> float:
        with torch.no_grad():
            loss = float(self.task.loss_sum(self.model, rows(99)))
        self.strategy.rest(self.model)
        return loss

    def weights(self) -> Weights:
        """What the optimizer trains."""
        trained = self.strategy.trained(self.model)
        return {name: whole(p.detach()).float().clone() for name, p in trained}

    def copies(self) -> str:
        """A digest of what the model computes with."""
        digest = hashlib.sha256()
        with torch.no_grad():
            for parameter in self.model.parameters():
                digest.update(bytes(parameter.contiguous().view(torch.uint8).flatten().tolist()))
        return digest.hexdigest()


def rows(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, CONFIG.vocabulary_size, (BATCH, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:4, :9] = -100  # so that ranks have unequal counts
    return Batch(ids[:, :-1].contiguous(), labels)


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# The layout of a bucket


@given(
    shapes=st.lists(
        st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ),
    shards=st.integers(1, 5),
)
def test_rows_are_cut_as_tensors_are_chunked(shapes: list[Any], shards: int) -> None:
    layout = BufferRows(shapes, shards)
    tensors = [torch.randn(shape) for shape in shapes]
    buffer = torch.zeros(shards, layout.width)
    for index, tensor in enumerate(tensors):
        layout.put(buffer, index, tensor)
    for index, tensor in enumerate(tensors):
        assert torch.equal(layout.take(buffer, index), tensor)
        chunks = list(tensor.chunk(shards))
        chunks += [tensor[:0]] * (shards - len(chunks))
        for shard, chunk in enumerate(chunks):
            assert torch.equal(layout.part(buffer[shard], index, shard), chunk)
    assert buffer.count_nonzero() == sum(int(t.count_nonzero()) for t in tensors)


# Against one process


def trained_on(ranks: Ranks, kind: str, options: dict[str, Any], steps: int = 4) -> Any:
    run = Training(strategy_of(ranks, kind), **options).steps(0, steps)
    return run.losses, run.norms, run.weights(), run.copies()


@ranked
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (2, {"lora": True, "recompute": True}),
        (4, {"recompute": True}),
        (4, {"lora": True}),
    ],
)
def test_updates_are_those_of_one_process(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    alone = Training(Strategy(), **options).steps(0, 4)
    results = pool.run(trained_on, "zero", options, ranks=ranks)
    for losses, norms, weights, copies in results:
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert norms == pytest.approx(alone.norms, rel=1e-4)
        assert weights.keys() == alone.weights().keys()
        for name, weight in alone.weights().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)
        assert same(weights, results[0][2])
        assert copies == results[0][3]


def test_one_rank_alone_is_a_process() -> None:
    alone = Training(Strategy()).steps(0, 3)
    zero = Training(strategy_of(Ranks(), "zero")).steps(0, 3)
    assert same(zero.weights(), alone.weights())
    assert same(zero.weights(), {n: p.detach() for n, p in zero.model.named_parameters()})
    assert (zero.losses, zero.norms) == (alone.losses, alone.norms)


def held(ranks: Ranks) -> Any:
    run = Training(strategy_of(ranks, "zero"), lora=True)
    masters = dict(run.strategy.trained(run.model))
    run.steps(0, 1)
    moments = [own_part(run.optimizer.state[p]["exp_avg"])[0].numel() for p in run.parameters]
    return {n: own_part(p.detach())[0].numel() for n, p in masters.items()}, sum(moments)


@ranked
def test_only_what_is_trained_is_cut(pool: Pool) -> None:
    reference = dict(
        Training(Strategy(), lora=True).strategy.trained(Training(Strategy(), lora=True).model)
    )
    results = pool.run(held, ranks=4)
    for name, parameter in reference.items():
        assert sum(masters[name] for masters, _ in results) == parameter.numel()
    assert all(masters.keys() == reference.keys() for masters, _ in results)
    assert sum(moments for _, moments in results) == sum(p.numel() for p in reference.values())


# Half precision


def half(ranks: Ranks) -> Any:
    run = Training(strategy_of(ranks, "zero"), half=True).steps(0, 3)
    dtypes = {p.dtype for p in run.model.parameters()}, {p.dtype for p in run.parameters}
    copies = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    return dtypes, copies, run.weights(), run.copies()


@ranked
def test_copies_are_the_masters_in_the_models_dtype(pool: Pool) -> None:
    results = pool.run(half)
    for dtypes, copies, weights, digest in results:
        assert dtypes == ({torch.bfloat16}, {torch.float32})
        assert digest == results[0][3]
        for name, weight in weights.items():
            assert torch.equal(copies[name], weight.bfloat16())
            assert not torch.equal(copies[name].float(), weight)


def accumulated(ranks: Ranks, parts: int) -> Tensor:
    """The gradient of a bf16 weight over many small micro-batches."""
    layer = nn.Linear(4, 1, bias=False).bfloat16()
    strategy = Zero(ranks)
    strategy.start(layer)
    for part in range(parts):
        strategy.before_backward(last=part == parts - 1)
        layer(torch.full((1, 4), 1.0 + 2.0**-7, dtype=torch.bfloat16)).sum().backward()
    strategy.after_backward()
    ((_, master),) = strategy.trained(layer)
    return whole(master.grad)


@ranked
def test_gradients_of_half_precision_add_up_in_full(pool: Pool) -> None:
    expected = torch.full((1, 4), 600 * (1.0 + 2.0**-7))  # bf16 would stay at 256
    assert all(torch.equal(found, expected) for found in pool.run(accumulated, 300))


# Parameters that are special


class Routed(nn.Module):
    """One of its three layers is used by rank 0 alone, one by nobody, one is shared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.layers.append(nn.Linear(5, 5, bias=False))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.layers[3](self.layers[0](x))
        return self.layers[1](x) if rank == 0 else x


def unused(ranks: Ranks, kind: str) -> Any:
    model = Routed()
    strategy = Zero(ranks, bucket_bytes=100)
    if kind == "ddp":
        strategy = Replicated(ranks, Layout.of(ranks.size), bucket_bytes=100)
    strategy.start(model)
    told: list[int] = []
    strategy.when_ready(model, lambda parameter: told.append(id(parameter)))
    strategy.before_backward(last=True)
    model(torch.ones(2, 5), ranks.rank).sum().backward()
    strategy.after_backward()
    trained = dict(strategy.trained(model))
    names = {id(parameter): name for name, parameter in trained.items()}
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in trained.items()}
    return gradients, [names[one] for one in told]


@ranked
def test_gradients_are_those_of_whole_replicas(pool: Pool) -> None:
    ours, theirs = pool.run(unused, "zero"), pool.run(unused, "ddp")
    for (gradients, told), (expected, told_there) in zip(ours, theirs, strict=True):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (gradients[name] is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient)
        assert told == told_there


def test_masters_keep_what_is_known_of_parameters() -> None:
    layer = nn.Linear(3, 3)
    describe_parameter(layer.weight, ParameterMetadata(learning_rate_multiplier=16.0))
    strategy = Zero(Ranks())
    strategy.start(layer)
    masters = dict(strategy.trained(layer))
    assert metadata(masters["weight"]).learning_rate_multiplier == 16.0
    assert metadata(masters["bias"]).weight_decay_multiplier == 0.0


def test_what_cannot_be_cut_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(InputError, match=r"give it the shape \[1\]"):
        Zero(Ranks()).start(model)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"scale: complex parameters .*view_as_real"):
        Zero(Ranks()).start(model)
    with pytest.raises(InputError, match="sharded over all ranks or none"):
        Zero(Ranks(0, 4), Layout.of(4, 2))


def in_backward(ranks: Ranks, early: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    strategy = Zero(ranks, bucket_bytes=40)
    strategy.start(model)
    optimizer = torch.optim.AdamW([p for _, p in strategy.trained(model)], lr=0.1)
    if early:
        stepper = Stepper(optimizer)

        def step(parameter: nn.Parameter) -> None:
            stepper.step([parameter])
            parameter.grad = None

        strategy.when_ready(model, step)
    for number in range(3):
        strategy.before_backward(last=True)
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(number))).sum().backward()
        strategy.after_backward()
        if early:
            strategy.updated()
        else:
            strategy.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@ranked
def test_an_optimizer_may_step_in_the_backward_pass(pool: Pool) -> None:
    early, late = pool.run(in_backward, True), pool.run(in_backward, False)
    assert all(same(one, late[0]) for one in (*early, *late))


def interrupted(ranks: Ranks) -> Any:
    """Gradients of an update that is discarded leave no trace."""
    run = Training(strategy_of(ranks, "zero"))
    run.strategy.before_backward(last=False)
    run.task.loss_sum(run.model, rows(50)).backward()
    run.strategy.discard()
    run.steps(0, 2)
    return run.weights()


@ranked
def test_a_discarded_update_leaves_no_trace(pool: Pool) -> None:
    there = pool.run(trained_on, "zero", {}, 2)
    assert all(same(one, there[0][2]) for one in pool.run(interrupted))


# Checkpoints


def saved(ranks: Ranks, folder: Path, kind: str, fields: dict[str, Any] | None) -> Any:
    run = Training(strategy_of(ranks, kind, fields)).steps(0, 2)
    store = CheckpointStore(folder, keep=1, ranks=ranks)
    store.save(2, run.registry, notes={})
    store.wait()
    run.steps(2, 4)
    return run.losses[2:], run.weights(), run.evaluate()


def resumed(
    ranks: Ranks, folder: Path, kind: str, fields: dict[str, Any] | None, skip: set[str]
) -> Any:
    run = Training(strategy_of(ranks, kind, fields))
    checkpoint = CheckpointStore(folder, ranks=ranks).newest(print)
    assert checkpoint is not None
    checkpoint.load(run.registry, skip=skip)
    run.steps(2, 4)
    return run.losses, run.weights(), run.evaluate()


@ranked
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("zero", None), ("zero", CODED), ("fsdp", CODED)],
    ids=["zero", "zero-coded", "fsdp-coded"],
)
def test_a_run_resumes_to_the_bit(
    pool: Pool, tmp_path: Path, kind: str, fields: dict[str, Any] | None
) -> None:
    whole_run = pool.run(saved, tmp_path, kind, fields)
    after = pool.run(resumed, tmp_path, kind, fields, set())
    for (losses, weights, loss), (losses_after, weights_after, loss_after) in zip(
        whole_run, after, strict=True
    ):
        assert losses == losses_after
        assert same(weights, weights_after)
        assert loss == loss_after


@ranked
@pytest.mark.expensive
@pytest.mark.parametrize(
    ("before", "fields", "after", "fields_after", "ranks"),
    [
        ("zero", None, "ddp", None, 2),
        ("zero", None, "fsdp", None, 4),
        ("ddp", None, "zero", None, 4),
        ("fsdp", None, "zero", None, 2),
        ("ddp", None, "zero", CODED, 2),
        ("zero", CODED, "ddp", None, 2),
        ("zero", CODED, "fsdp", CODED, 4),
        ("fsdp", CODED, "zero", CODED, 4),
    ],
)
def test_any_strategy_takes_up_anothers_checkpoint(
    pool: Pool,
    tmp_path: Path,
    before: str,
    fields: dict[str, Any] | None,
    after: str,
    fields_after: dict[str, Any] | None,
    ranks: int,
) -> None:
    whole_run = pool.run(saved, tmp_path, before, fields)[0]
    skip = set() if bool(fields) == bool(fields_after) else {"exchange"}
    results = pool.run(resumed, tmp_path, after, fields_after, skip, ranks=ranks)
    tolerance = 0.1 if fields or fields_after else 1e-4
    for losses, weights, _ in results:
        assert losses == pytest.approx(whole_run[0], rel=tolerance)
        assert weights.keys() == whole_run[1].keys()
        assert same(weights, results[0][1])


# FSDP2 with an exchange


def on_fsdp(ranks: Ranks, fields: dict[str, Any] | None, micro: int) -> Any:
    run = Training(strategy_of(ranks, "fsdp", fields)).steps(0, 1, micro)
    exchange = run.strategy.exchange
    before = exchange.sent() if exchange else {}
    run.evaluate()
    run.evaluate()
    between = exchange.sent() if exchange else {}
    run.steps(1, 4, micro)
    run.evaluate()
    loss = run.evaluate()
    gathered = "all_gather", "shard"
    sent = [counts[gathered] for counts in (before, between, exchange.sent())] if exchange else []
    return run.losses, run.weights(), loss, sent


@ranked
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_codecs_on_fsdp_change_nothing(pool: Pool, ranks: int) -> None:
    exact = {"weight_bits": 32, "gradient_bits": 32, "inner_bits": 32}
    plain = pool.run(on_fsdp, None, 1, ranks=ranks)
    coded = pool.run(on_fsdp, exact, 1, ranks=ranks)
    for (losses, weights, loss, _), (coded_losses, coded_weights, coded_loss, _) in zip(
        plain, coded, strict=True
    ):
        if ranks == 2:  # a sum of more has an order, which is another in gloo's all-reduce
            assert coded_losses == losses
            assert same(coded_weights, weights)
            assert coded_loss == loss
        assert coded_losses == pytest.approx(losses, rel=1e-5)
        assert same(coded_weights, coded[0][1])


@ranked
def test_gathers_on_fsdp_move_bytes_once_an_update(pool: Pool) -> None:
    once, often = pool.run(on_fsdp, CODED, 4), pool.run(on_fsdp, CODED, 1)
    for (_, _, _, sent), (_, _, _, sent_often) in zip(once, often, strict=True):
        first, evaluated, last = sent
        # The weights themselves, then differences: one set after each of the updates.
        coded = evaluated - first
        assert first > 6 * coded > 0
        assert last - evaluated == 3 * coded
        assert sent == sent_often  # whatever the micro-batches


def refuses(ranks: Ranks) -> Any:
    exchange = ShardExchange(ExchangeContext(ranks))
    with pytest.raises(InputError, match="saves nothing") as reshard:
        Sharded(ranks, Layout.of(2, 2), reshard_after_forward=True, exchange=exchange)
    strategy = strategy_of(ranks, "fsdp", CODED)
    with pytest.raises(InputError, match="frozen weights too"):
        Training(strategy, lora=True)
    return reshard.value.field


@ranked
def test_what_an_exchange_on_fsdp_cannot_is_refused(pool: Pool) -> None:
    assert pool.run(refuses) == ["parallel.reshard_after_forward"] * 2
    with pytest.raises(InputError, match="over all ranks at once"):
        Sharded(Ranks(0, 4), Layout.of(4, 2), False, ShardExchange(ExchangeContext(Ranks(0, 4))))


def kinds(ranks: Ranks) -> Any:
    run = Training(strategy_of(ranks, "zero"))
    return [
        is_sharded(parameter) and parameter.dtype == torch.float32 for parameter in run.parameters
    ]


@ranked
def test_masters_are_dtensors_in_fp32(pool: Pool) -> None:
    assert all(all(flags) for flags in pool.run(kinds))


# What it costs


class Layers(nn.Module):
    """Some layers of a size that counts beside what a rank holds anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 259) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def spent(ranks: Ranks, fields: dict[str, Any] | None, bucket_bytes: int) -> Any:
    """Bytes that persist, the peaks of a backward pass and of an update, and bytes sent."""
    torch.manual_seed(0)
    exchange = ShardExchange(ExchangeContext(ranks))
    if fields is not None:
        exchange = SDP4Bit(**fields).bind(ExchangeContext(ranks))
    model, strategy = Layers(), Zero(ranks, None, exchange, bucket_bytes)
    strategy.start(model)
    masters = [p for _, p in strategy.trained(model)]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    peaks = []
    for _ in range(2):
        loss = model(torch.ones(1, 256))
        strategy.before_backward(last=True)
        with TensorMeter("cpu") as meter:
            loss.backward()
            strategy.after_backward()
        peaks.append(meter.peak)
        optimizer.step()
        with TensorMeter("cpu") as meter:
            strategy.updated()
        peaks.append(meter.peak)
        optimizer.zero_grad(set_to_none=True)
    held = tensor_bytes([*model.parameters()]), tensor_bytes(masters)
    return held, peaks[2:], exchange.sent()


@ranked
@pytest.mark.parametrize("bucket_bytes", [500_000, 25_000_000], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("fields", [None, {"ranks_per_node": 1}], ids=["plain", "coded"])
def test_what_a_rank_spends_is_in_the_ledger(
    pool: Pool, fields: dict[str, Any] | None, bucket_bytes: int
) -> None:
    shapes = trained_shapes(Layers())
    plain = ShardExchange.ledger if fields is None else SDP4Bit(**fields).ledger
    ledger = exchange_ledger.zero(
        Ledger(), shapes, ranks=2, ranks_per_node=2, bucket_bytes=bucket_bytes, exchange=plain
    )
    wires = Counter[tuple[str, str]]()
    for wire in ledger.wire:
        wires[wire.collective, wire.axis] += wire.bytes
    # The meter sees this rank's gradients, as large as its masters, which it does not see. They
    # land one bucket after the other, so not all are there when the last one is coded, which is
    # when the pass is over and the ledger counts it to the step. On a busy machine gloo's thread
    # may hold one bucket more.
    expected = max(ledger.bytes(phase="backward"), ledger.bytes(phase="step"))
    for _ in range(3):
        found = pool.run(spent, fields, bucket_bytes)
        if all(max(peaks) < 1.05 * expected for _, peaks, _ in found):
            break
    for rank, (held, (backward, update), sent) in enumerate(found):
        copies, masters = held
        assert copies == sum(shape.bytes for shape in shapes)
        if rank == 0:  # the one with the largest part
            assert masters == ledger.bytes("weight")
        assert {key: sent[key] / 2 for key in wires} == wires  # two updates
        assert 0.75 * expected < max(backward, update) < 1.05 * expected
