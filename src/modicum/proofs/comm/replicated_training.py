"""A bench for exchanges of full matrices: replicas that learn digits, and steps on a slow link.

What is here runs at ranks that a proof has started.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.comm import ACPSGD, DenseSums, PowerSGD
from modicum.comm.base import MatrixMethod
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.ranks.exchange import SHARD, ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange, MatrixQuery
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.exchange_ledger import bucket_shapes
from modicum.parallel.replicated import Replicated
from modicum.proofs.bench.training import train
from modicum.proofs.comm.sharded_training import SCHEDULE, generator_of
from modicum.proofs.comm.step_time_bench import Fields

METHODS: dict[str, type[MatrixMethod]] = {
    "acp_sgd": ACPSGD,
    "dense_sums": DenseSums,
    "powersgd": PowerSGD,
}
BUCKET = 40_000
TRAINED = 1437  # images that are learned from; the others are held out


def exchange_of(ranks: Ranks, arm: Fields, link: Link | None = None) -> MatrixExchange:
    """The exchange of an arm: a method's name and fields, or none, which sends numbers as such."""
    context = ExchangeContext(ranks, links={} if link is None else {SHARD: link})
    value = method_of(arm)
    return MatrixExchange(context) if value is None else value.bind(context)


def method_of(arm: Fields) -> MatrixMethod | None:
    """The method's value; None: numbers are sent as they are."""
    fields = {key: value for key, value in arm.items() if key != "method"}
    return METHODS[arm["method"]](**fields) if "method" in arm else None


def said_to_send(arm: Fields, model: nn.Module, ranks: int, bucket: int = BUCKET) -> int:
    """Bytes that the ledger says a rank sends in an update of this model."""
    value, at = method_of(arm), MatrixQuery(bucket_shapes(trained_shapes(model), bucket), ranks)
    ledger = MatrixExchange.ledger(at) if value is None else value.ledger(at)
    return sum(wire.bytes for wire in ledger.wire)


@dataclass(frozen=True)
class DigitsSize:
    """How large the experiment is: two hidden layers of `width`, `rows` images an update."""

    width: int = 128
    rows: int = 256
    steps: int = 400
    learning_rate: float = 0.1


def trained(
    ranks: Ranks, *, arms: Mapping[str, Fields], size: Fields, seeds: list[int]
) -> dict[str, Any]:
    """Each arm's held-out loss by seed (nats an image), and its bytes and calls an update."""
    chosen, known = DigitsSize(**size), dict[str, Any]()
    for arm in arms.values():
        if str(arm) not in known:  # several labels may name one arm
            found = [_train(ranks, arm, chosen, seed) for seed in seeds]
            known[str(arm)] = {"losses": [loss for loss, _ in found], **found[0][1]}
    return {label: known[str(arm)] for label, arm in arms.items()}


def _train(ranks: Ranks, arm: Fields, size: DigitsSize, seed: int) -> tuple[float, Any]:
    images, labels = _digits()
    exchange = exchange_of(ranks, arm)
    model, strategy = _trained_model(ranks, exchange, size, seed)
    meter = exchange.wire.meter
    counted = {
        "bytes": meter.bytes["all_reduce"] / size.steps,
        "calls": meter.calls["all_reduce"] / size.steps,
        "buckets": len(strategy.buckets),
        "said": said_to_send(arm, model, ranks.size),
    }
    with torch.no_grad():
        return float(_loss(model(images[TRAINED:]), labels[TRAINED:])), counted


def bits_apart(ranks: Ranks, *, arm: Fields, size: Fields) -> float:
    """The largest difference of a weight from replicas whose gradients no exchange carries."""
    models = [
        _trained_model(ranks, exchange, DigitsSize(**size), 0)[0]
        for exchange in (exchange_of(ranks, arm), None)
    ]
    ours, theirs = (nn.utils.parameters_to_vector(model.parameters()) for model in models)
    return float((ours - theirs).abs().max().detach())


def _trained_model(
    ranks: Ranks, exchange: MatrixExchange | None, size: DigitsSize, seed: int
) -> tuple[nn.Module, Replicated]:
    images, labels = _digits()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, size.width),
        nn.Tanh(),
        nn.Linear(size.width, size.width),
        nn.Tanh(),
        nn.Linear(size.width, 10),
    )
    strategy = Replicated(ranks, Layout.of(ranks.size), BUCKET, exchange)
    strategy.start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=size.learning_rate, momentum=0.9)
    generator = generator_of(f"training {ranks.rank}", seed)

    def loss(step: int) -> Tensor:
        chosen = torch.randint(TRAINED, (size.rows // ranks.size,), generator=generator)
        return _loss(model(images[chosen]), labels[chosen]) / ranks.size

    train([optimizer], loss, size.steps, schedule=SCHEDULE, clip=1.0, strategy=strategy)
    return model, strategy


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with a tenth of each label spread over all: so it has a floor above zero."""
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, in an order of their own: [1797, 64], and which they are."""
    loaded = importlib.import_module("sklearn.datasets").load_digits()
    order = torch.randperm(len(loaded.target), generator=generator_of("order", 0))
    images = torch.tensor(loaded.images, dtype=torch.float32).view(-1, 64) / 8 - 1
    return images[order], torch.tensor(loaded.target)[order]


def timed(
    ranks: Ranks, *, arms: Mapping[str, Fields], width: int, layers: int, rate: float, steps: int
) -> dict[str, float]:
    """Seconds of a step of square layers on a link of so many bytes a second, arms in turns."""
    runs = {}
    for label, arm in arms.items():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        strategy = Replicated(
            ranks,
            Layout.of(ranks.size),
            4 * width * width,
            exchange_of(ranks, arm, Link(rate)),
        )
        strategy.start(model)
        runs[label] = (model, strategy, torch.optim.SGD(model.parameters(), lr=1e-3))
    seconds: dict[str, list[float]] = {label: [] for label in arms}
    for _ in range(steps + 1):
        for label, (model, strategy, optimizer) in runs.items():
            ranks.sum(0.0)
            started = time.perf_counter()
            strategy.before_backward(last=True)
            model(torch.ones(16, width)).square().mean().backward()
            strategy.after_backward()
            strategy.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
            seconds[label].append(time.perf_counter() - started)
    return {label: statistics.median(each[1:]) for label, each in seconds.items()}
