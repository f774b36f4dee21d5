"""Adapters that rewrite the base, and ones whose tensors are shared, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from modicum.adapters import Hydra, LoRA, LoRAFA, MoS, PiSSA, RandLoRA, SHiRA
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.core.contracts.parameters import optimizer_groups, trainable
from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded

pytestmark = pytest.mark.ranks
# Rows that no number of ranks divides, widths that shards of MoS do.
CONFIG = ModelConfig(
    vocabulary_size=53, width=18, layers=3, heads=3, mlp_width=30, initializer_range=0.3
)
METHODS: dict[str, Adapter] = {
    "pissa": PiSSA(rank=3, niter=2),
    "mos": MoS(rank=4, equivalent_rank=2, private_rank=1, shards=3),
    "lora_fa": LoRAFA(rank=4, alpha=8.0),
    "randlora": RandLoRA(rank=4),
    "hydra": Hydra(rank=2, sequential_rank=1, learn_scale=True),
    "shira": SHiRA(rank=2, mask="magnitude"),
    "copies": LoRA(rank=2, also=("norm", "*layernorm")),
}
STEPS, ROWS = 3, 4


def strategy_of(ranks: Ranks, kind: str) -> Strategy:
    if ranks.alone:
        return Strategy()
    if kind == "ddp":
        return Replicated(ranks, Layout.of(ranks.size), bucket_bytes=4000)
    return Sharded(ranks, Layout.of(ranks.size, ranks.size))


class Training:
    """A run as the trainer builds one: on meta, cut, filled, begun, a few updates."""

    def __init__(
        self,
        ranks: Ranks,
        kind: str,
        method: str,
        *,
        linear: str = "dense",
        dtype: torch.dtype = torch.float32,
        kept: dict[str, Tensor] | None = None,
        recompute: bool = False,
    ) -> None:
        self.strategy = strategy_of(ranks, kind)
        full = Llama(CONFIG).initialise(0)
        with on_meta(dtype):
            forms = FormPlan().with_default(linear)
            self.model = Llama(ModelConfig(**(vars(CONFIG) | {"forms": forms})))
            self.adapter = METHODS[method].attach(self.model, seed=1)
        self.model.recompute = recompute
        self.strategy.cut(self.model, self.model.model.layers, torch.device("cpu"))
        materialise(self.model, "cpu")
        self.model.initialise(0)

        def weights(name: str) -> Tensor:
            return full.get_submodule(name).weight.detach()

        self.adapter.initialise(weights, kept, ranks)
        self.strategy.start(self.model)
        groups = optimizer_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self.registry = StateRegistry()
        self.strategy.register(self.registry, self.model)
        self.registry.add_view(optimizer_view(self.optimizer))

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        ranks = self.strategy.ranks
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(CONFIG.vocabulary_size, (ROWS, 9), generator=generator)
            mine = ids[ranks.rank :: ranks.size].split(1)
            total = 0.0
            for place, part in enumerate(mine):
                logits = self.model(part[:, :-1]).float()
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
                ) / (ROWS * 8)
                self.strategy.before_backward(last=place == len(mine) - 1)
                loss.backward()
                total += loss.item()
            self.strategy.after_backward()
            parameters = [p for _, p in trainable(self.model)]
            self.strategy.clip(parameters, 1.0, self.strategy.norm(parameters))
            self.strategy.update(self.optimizer)
            self.optimizer.zero_grad()
            losses.append(ranks.sum(total)[0])
        self.strategy.rest(self.model)
        return losses

    def weights(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: whole(value.detach()).clone() for name, value in named}

    def state(self) -> dict[str, Any]:
        """The whole of what a checkpoint holds, in tensors of its own."""
        return {
            name: {
                key: whole(value).clone() if isinstance(value, Tensor) else value
                for key, value in view.items()
            }
            for name, view in self.registry.read().items()
        }


def trained(ranks: Ranks, kind: str, method: str, options: dict[str, Any]) -> Any:
    training = Training(ranks, kind, method, **options)
    start = training.weights()
    return start, training.steps(0, STEPS), training.weights()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", list(METHODS))
def test_updates_are_those_of_one_process(pool: Pool, kind: str, method: str) -> None:
    options = {"recompute": kind == "fsdp"}
    start, losses, end = trained(Ranks(), kind, method, options)
    results = pool.run(trained, kind, method, options)
    for their_start, their_losses, their_end in results:
        assert their_start.keys() == start.keys()
        for name, value in start.items():
            # Where one rank splits and all are told, the start is one process's.
            torch.testing.assert_close(their_start[name], value, rtol=0, atol=1e-6)
        assert their_losses == pytest.approx(losses, rel=1e-5)
        for name, value in end.items():
            torch.testing.assert_close(their_end[name], value, rtol=1e-3, atol=1e-4)
            assert torch.equal(their_end[name], results[0][2][name]), name
    moved = [name for name in end if not torch.equal(start[name], end[name])]
    counts = {
        "mos": 14,
        "pissa": 3 * 7 * 2,
        "lora_fa": 3 * 7,
        "randlora": 42,
        "copies": 3 * 7 * 2 + 7,
        "hydra": 3 * 7 * 5,
        "shira": 3 * 7,
    }
    assert len(moved) == counts[method]  # every trained tensor, each once, and nothing else


def resumed(ranks: Ranks, kind: str, method: str, options: dict[str, Any]) -> Any:
    straight = Training(ranks, kind, method, **options)
    straight.steps(0, STEPS)
    begun = Training(ranks, kind, method, **options)
    begun.steps(0, 1)
    state = begun.state()
    base = begun.weights()
    again = Training(ranks, kind, method, kept=state["model"], **options)
    again.registry.write(state)
    for name, value in again.weights().items():
        assert torch.equal(value, base[name]), f"{name} is another after the interruption"
    again.steps(1, STEPS)
    expected, found = straight.weights(), again.weights()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.expensive
@pytest.mark.parametrize("options", [{}, {"linear": "nf4"}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", list(METHODS))
def test_it_goes_on_to_the_bit(pool: Pool, kind: str, method: str, options: dict[str, Any]) -> None:
    if "linear" in options and "writes_base" in METHODS[method].traits:
        with pytest.raises(InputError, match="written into a dense one"):
            Training(Ranks(), kind, method, **options)
        return
    assert pool.run(resumed, kind, method, options) == [[], []]


def splits(ranks: Ranks, kind: str) -> tuple[int, list[Tensor]]:
    """How many SVDs this rank made, and what all came to."""
    import modicum.adapters.pissa as home

    made = [0]
    original = home.kept_svd

    def counting(*args: Any, **named: Any) -> Any:
        made[0] += 1
        # Another kind of machine: what it splits differs a little.
        return tuple(part * (1 + 1e-6 * ranks.rank) for part in original(*args, **named))

    home.kept_svd = counting
    try:
        training = Training(ranks, kind, "pissa")
    finally:
        home.kept_svd = original
    return made[0], list(training.weights().values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_share_the_splitting_and_agree_to_the_bit(pool: Pool, kind: str) -> None:
    (first, mine), (second, theirs) = pool.run(splits, kind)
    assert sorted((first, second)) == [10, 11]  # of 21 layers
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def without_a_reader(ranks: Ranks) -> list[float]:
    """Sharded weights that nobody reads anew are gathered, one at a time."""
    strategy = strategy_of(ranks, "fsdp")
    with on_meta():
        model = Llama(CONFIG)
        adapter = METHODS["pissa"].attach(model, seed=1)
    strategy.cut(model, model.model.layers, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    adapter.initialise(ranks=ranks)
    strategy.start(model)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        base = Llama(CONFIG).initialise(0)(ids)
        found = [(model(ids) - base).abs().max().item()]
        strategy.rest(model)
        _move(adapter)
        beside = model(ids)
        found.append((beside - base).abs().max().item())
        strategy.rest(model)
        adapter.merge()
        found.append((model(ids) - beside).abs().max().item())
        strategy.rest(model)
        adapter.unmerge()
        with adapter.disabled():
            found.append((model(ids) - base).abs().max().item())
    dist.barrier()
    return found


def _move(adapter: AttachedAdapter) -> None:
    for parameter in adapter.parameters():
        parameter.detach().to_local().add_(0.05)  # type: ignore[attr-defined]


def test_weights_that_are_cut_are_gathered_and_merged(pool: Pool) -> None:
    for start, moved, merged, off in pool.run(without_a_reader):
        assert start < 1e-5
        assert moved > 0.1
        assert merged < 2e-5
        assert off < 2e-5


def saved(ranks: Ranks, kind: str, method: str, folder: str) -> Tensor:
    training = Training(ranks, kind, method)
    training.steps(0, 2)
    training.adapter.save(f"{folder}/peft", write=ranks.first)
    training.adapter.save(f"{folder}/own", form="modicum", write=ranks.first)
    with torch.no_grad():
        return training.model(torch.arange(8).view(1, 8))


@pytest.mark.parametrize("method", list(METHODS))
def test_what_is_cut_over_ranks_is_saved_whole(pool: Pool, method: str, tmp_path: Any) -> None:
    from modicum.adapters import load

    outputs = pool.run(saved, "fsdp", method, str(tmp_path))
    for form in ("peft", "own"):
        model = Llama(CONFIG).initialise(0)
        load(model, tmp_path / form)
        found = model(torch.arange(8).view(1, 8))
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=2e-5)


def folded_on_ranks(ranks: Ranks, method: str, folder: str) -> tuple[float, float, Tensor]:
    training = Training(ranks, "fsdp", method)
    training.steps(0, 2)
    ids = torch.arange(8).view(1, 8)
    how: dict[str, Any] = {"rank": 4, "tolerance": 2.0, "batches": [ids], "write": ranks.first}
    lost = training.adapter.save(folder, **how)
    assert lost is not None
    assert lost.logits is not None
    with torch.no_grad():
        return lost.weights, lost.logits, training.model(ids)


@pytest.mark.parametrize("method", ["pissa", "randlora"])
def test_what_is_sharded_over_ranks_is_folded(pool: Pool, method: str, tmp_path: Any) -> None:
    from modicum.adapters import load

    ids = torch.arange(8).view(1, 8)
    outputs = pool.run(folded_on_ranks, method, str(tmp_path / "folded"))
    assert outputs[0][:2] == pytest.approx(outputs[1][:2], rel=1e-4)
    weights, logits, ours = outputs[0]
    assert 0 < weights < 0.9
    model = Llama(CONFIG).initialise(0)
    base = model(ids)
    load(model, tmp_path / "folded")
    error = (model(ids) - ours).norm() / (ours - base).norm()
    assert logits == pytest.approx(float(error.detach()), rel=0.02)
