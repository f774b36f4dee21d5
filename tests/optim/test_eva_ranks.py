"""Eva on several ranks, whole and sharded, against the same updates in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import CONFIG, LAYOUTS, strategy_of
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.models.llama import Llama
from modicum.optim import SGD, Eva, TransformContext
from modicum.optim.transform import GradientTransform

pytestmark = pytest.mark.ranks
BATCH, STEPS = 8, 3


def rows(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, targets, and which positions count: rows of unequal length."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(29, (BATCH, 9), generator=generator)
    lengths = torch.tensor([8, 3, 5, 8, 2, 8, 8, 7])
    counted = torch.arange(8) < lengths[:, None]
    return ids[:, :-1], ids[:, 1:].masked_fill(~counted, -100), counted


class Training:
    """The decoder, Eva, momentum and a strategy, as the trainer puts them together."""

    method: type[GradientTransform] = Eva

    def __init__(self, ranks: Ranks, layout: str, recompute: bool, **fields: Any) -> None:
        self.ranks, self.strategy = ranks, strategy_of(ranks, layout)
        with on_meta():
            self.model = Llama(CONFIG)
        self.model.recompute = recompute
        self.strategy.cut(self.model, self.model.model.layers, torch.device("cpu"))
        materialise(self.model, "cpu")
        self.model.initialise(0)
        self.strategy.start(self.model)
        trained = dict(self.strategy.trained(self.model))
        groups = optimizer_groups(self.model, learning_rate=0.1, weight_decay=0.0, trained=trained)
        self.optimizer = SGD(groups, momentum=0.9)
        self.eva: Any = self.method(**fields).bind(
            TransformContext(
                self.model,
                parameters=trained,
                ranks=ranks,
                optimizer=self.optimizer,
                reduction="sum",
            )
        )
        self.norms: list[float] = []
        self.registry = StateRegistry()
        self.strategy.register(self.registry, self.model)
        self.registry.add_view(optimizer_view(self.optimizer))
        self.registry.add_object("transform", self.eva)

    def steps(self, first: int, last: int) -> None:
        share = BATCH // self.ranks.size
        mine = slice(self.ranks.rank * share, (self.ranks.rank + 1) * share)
        for step in range(first, last):
            ids, targets, counted = rows(step)
            tokens = int((targets != -100).sum())
            # One micro-batch is of one row, the other has the rest.
            parts = [t[mine].split([1, share - 1]) for t in (ids, targets, counted)]
            for place, (some, wanted, mask) in enumerate(zip(*parts, strict=True)):
                self.strategy.before_backward(last=place == 1)
                with self.eva.capturing(mask=mask):
                    logits = self.model(some).flatten(0, 1)
                    loss = F.cross_entropy(logits, wanted.flatten(), reduction="sum") / tokens
                    loss.backward()
            self.strategy.after_backward()
            self.eva.apply(loss=self.loss_of(step))
            parameters = [p for _, p in self.strategy.trained(self.model)]
            self.norms.append(float(whole(self.strategy.norm(parameters))))
            self.strategy.update(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)

    def loss_of(self, step: int) -> float | None:
        """What a method that follows losses is shown."""
        return None

    def outcome(self) -> dict[str, Any]:
        self.strategy.flush()
        self.strategy.rest(self.model)
        weights = {n: whole(p.detach()).clone() for n, p in self.model.named_parameters()}
        return {"norms": self.norms, "weights": weights, "state": self.eva.state_dict()}


def on_ranks(ranks: Ranks, layout: str, recompute: bool, fields: dict[str, Any]) -> Any:
    training = Training(ranks, layout, recompute, **fields)
    training.steps(0, STEPS)
    return training.outcome()


CASES = [
    ("ddp 2", False, {}),
    pytest.param("ddp 4", True, {}, marks=pytest.mark.expensive),
    ("fsdp 2", True, {}),
    pytest.param("fsdp 4", False, {"kl_clip": 0.0}, marks=pytest.mark.expensive),
    ("hybrid 4", True, {}),
    ("fsdp 4", False, {"variant": "f"}),
    ("fsdp 4", False, {"variant": "s"}),
    ("ddp 2", False, {"variant": "s"}),
]


# With 4 ranks a share is two rows; the second micro-batch of the others has more. What is compared
# does not depend on how rows are cut.
@pytest.mark.parametrize(("layout", "recompute", "fields"), CASES, ids=str)
def test_updates_are_those_of_one_process(
    pool: Pool, layout: str, recompute: bool, fields: dict[str, Any]
) -> None:
    alone = on_ranks(Ranks(), "alone", recompute, fields)
    results = pool.run(on_ranks, layout, recompute, fields, ranks=LAYOUTS[layout][0])
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert result["state"].keys() == alone["state"].keys()
        for name, value in alone["state"].items():
            found = result["state"][name]
            if name == "updates":
                assert found == value == STEPS
                continue
            torch.testing.assert_close(
                found, value, rtol=1e-3, atol=1e-5 * float(value.abs().max())
            )
            assert torch.equal(found, results[0]["state"][name])  # the same on every rank
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-3, atol=1e-4)
            assert torch.equal(result["weights"][name], results[0]["weights"][name])


def test_the_means_are_those_of_unequal_ranks_together(pool: Pool) -> None:
    """After one update, before rounding can grow: a and g to fp32's precision."""
    alone = first_means(Ranks(), "alone")
    for layout in ("ddp 2", "fsdp 4"):
        for found in pool.run(first_means, layout, ranks=LAYOUTS[layout][0]):
            for one, other in zip(found, alone, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=2e-5, atol=1e-6 * float(other.abs().max())
                )


def first_means(ranks: Ranks, layout: str) -> list[Tensor]:
    training = Training(ranks, layout, False)
    training.steps(0, 1)
    return [value for name, value in training.eva.state_dict().items() if name != "updates"]


def saved(ranks: Ranks, layout: str, folder: Path) -> dict[str, Any]:
    training = Training(ranks, layout, False, every=3)
    training.steps(0, 2)
    CheckpointStore(folder, ranks=ranks).save(2, training.registry)
    training.steps(2, 5)
    return training.outcome()


def resumed(ranks: Ranks, layout: str, folder: Path) -> dict[str, Any]:
    training = Training(ranks, layout, False, every=3)
    training.steps(20, 21)
    checkpoint = CheckpointStore(folder, ranks=ranks).newest()
    assert checkpoint is not None
    checkpoint.load(training.registry)
    training.steps(2, 5)
    return training.outcome()


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "hybrid 4"])
def test_a_run_resumes_to_the_bit(pool: Pool, layout: str, tmp_path: Path) -> None:
    count = LAYOUTS[layout][0]
    straight = pool.run(saved, layout, tmp_path, ranks=count)
    again = pool.run(resumed, layout, tmp_path, ranks=count)
    for one, other in zip(straight, again, strict=True):
        assert one["norms"][2:] == other["norms"][1:]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
        for name, value in one["state"].items():
            if name == "updates":
                assert value == other["state"][name] == 5
            else:
                assert torch.equal(value, other["state"][name]), name


@pytest.mark.expensive
@pytest.mark.parametrize(("before", "after"), [("ddp 2", "fsdp 4"), ("fsdp 2", "alone")])
def test_a_run_resumes_on_another_layout(
    pool: Pool, before: str, after: str, tmp_path: Path
) -> None:
    straight = pool.run(saved, before, tmp_path, ranks=LAYOUTS[before][0])[0]
    for found in pool.run(resumed, after, tmp_path, ranks=LAYOUTS[after][0]):
        assert found["norms"][1:] == pytest.approx(straight["norms"][2:], rel=1e-3)
        for name, weight in straight["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4)


def exchanged(ranks: Ranks, layout: str) -> tuple[list[tuple[int, int]], int]:
    """(elements, ranks) of every exchange of one `apply`, and in + 1 + out over all layers."""
    training = Training(ranks, layout, False)
    seen: list[tuple[int, int]] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, group: Any = None, **named: Any) -> Any:
        seen.append((tensor.numel() * tensor.element_size(), dist.get_world_size(group)))
        return original(tensor, *arguments, group=group, **named)

    apply = training.eva.apply

    def measured(*arguments: Any, **named: Any) -> None:
        dist.all_reduce = counted
        try:
            apply(*arguments, **named)
        finally:
            dist.all_reduce = original

    training.eva.apply = measured  # type: ignore[method-assign]
    training.steps(0, 1)
    return seen, sum(at.in_features + 1 + at.out_features for at in training.eva.layers)


def test_what_crosses_the_wire(pool: Pool) -> None:
    for layout, expected in (("ddp 2", 1), ("fsdp 2", 2), ("hybrid 4", 2)):
        count = LAYOUTS[layout][0]
        for seen, numbers in pool.run(exchanged, layout, ranks=count):
            assert seen[0] == (4 * numbers, count)
            assert seen[1:] == [(2 * 4 * 14, 2)][: expected - 1]


def under_ddp(ranks: Ranks) -> list[Tensor]:
    """PyTorch's own data parallelism, which averages: equal shares of one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    wrapped = model if ranks.alone else nn.parallel.DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    eva = Eva().bind(TransformContext(model, ranks=ranks, optimizer=optimizer))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = torch.randn(8, 5, generator=generator).tensor_split(ranks.size)[ranks.rank]
        wrapped(inputs).square().mean().backward()
        eva.apply()
        optimizer.step()
        optimizer.zero_grad()
    return [*(p.detach() for p in model.parameters()), eva.means.averages]


def test_under_pytorchs_ddp_gradients_are_means(pool: Pool) -> None:
    alone = under_ddp(Ranks())
    for found in pool.run(under_ddp):
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def mixed(ranks: Ranks) -> str:
    """A model of which one layer is cut over the ranks, and another is whole on each."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    with pytest.raises(InputError) as caught:
        Eva(kl_clip=None).bind(TransformContext(model, ranks=ranks))
    return str(caught.value)


def test_layers_that_are_cut_and_whole_ones_are_refused(pool: Pool) -> None:
    for message in pool.run(mixed):
        assert message.startswith("exclude: 1 is sharded otherwise than 0")
