"""MoSA: experts part the matrix, train in turns, agree, and merge into the plain adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.adapters import MoSA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.mosa import ConsistentSteps, MoSALayer
from modicum.core.contracts.parameters import is_idle, optimizer_groups
from modicum.core.contracts.step import StandardStep, StepContext
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputing_in
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.data.batch import Batch
from modicum.models.llama import Llama
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.proofs.adapters.serial_bench import Bottleneck
from modicum.proofs.contracts.adapters.subjects import LLAMA, llama, numbers, stir, tokens

WIDTH, BEHIND = 9, {"targets": ("all-blocks",), "place": "after", "scale": 1.0}
ONE_PASS = {"passes": 1, "bottleneck": 5, **BEHIND}


def blocks() -> nn.Sequential:
    """Two blocks [..., 9] to [..., 9]."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    )


def layers_of(adapter: AttachedAdapter) -> list[MoSALayer]:
    found = [layer for _, layer in adapter.layers()]
    assert all(isinstance(layer, MoSALayer) for layer in found)
    return found  # type: ignore[return-value]


def masks(layer: MoSALayer, which: str) -> Tensor:
    """Which entries each expert has, 0 or 1 [experts, out, in]."""
    start = layer._buffers.get(f"{which}_start", torch.zeros(()))
    count = layer.method.experts
    before = [layer.get_parameter(f"{which}_{each}").detach().clone() for each in range(count)]
    with torch.no_grad():
        for each in range(count):
            layer.get_parameter(f"{which}_{each}").fill_(1.0)
        found = torch.stack([layer.matrix(which, row.tolist()) - start for row in torch.eye(count)])
        for each, values in enumerate(before):
            layer.get_parameter(f"{which}_{each}").copy_(values)
    return found.round()


@pytest.mark.parametrize("experts", [2, 4, 5])
@pytest.mark.parametrize("split", ["entries", "rows", "columns"])
def test_experts_part_each_matrix(split: str, experts: int) -> None:
    value = MoSA(experts=experts, share="none", split=split, **ONE_PASS)  # type: ignore[arg-type]
    layer, other = layers_of(value.attach(blocks()))
    for which, shape in value.shapes(layer.site).items():
        found = masks(layer, which)
        assert torch.equal(found.sum(0), torch.ones(shape))
        sizes = found.sum((1, 2))
        unit = {"entries": 1, "rows": shape[1], "columns": shape[0]}[split]
        assert (sizes.max() - sizes.min()) <= unit
        assert sizes.tolist() == [
            layer.get_parameter(f"{which}_{e}").numel() for e in range(experts)
        ]
        if split == "rows":
            assert all(row in (0.0, shape[1]) for row in found.sum(2).flatten().tolist())
        if split == "columns":
            assert all(col in (0.0, shape[0]) for col in found.sum(1).flatten().tolist())
    drawn = [f"{which}_index" for which in ("down", "up")]
    assert any(not torch.equal(layer.get_buffer(n), other.get_buffer(n)) for n in drawn)


@pytest.mark.parametrize("share", ["down", "up", "none"])
def test_every_expert_starts_as_the_base_and_their_mean_is_the_merged_one(share: str) -> None:
    value = MoSA(share=share, **ONE_PASS)  # type: ignore[arg-type]
    model, x = blocks(), numbers(4, WIDTH)
    before = model(x)
    adapter = value.attach(model)
    steps = adapter.steps()
    for _ in range(5):
        assert torch.equal(model(x), before)
        steps.update()
    stir(adapter)
    for layer in layers_of(adapter):
        for which in value.split_matrices:
            y = numbers(6, layer.mean_matrix(which).shape[1])
            each = [F.linear(y, layer.matrix(which, row.tolist())) for row in torch.eye(4)]
            merged = F.linear(y, layer.mean_matrix(which))
            torch.testing.assert_close(torch.stack(each).mean(0), merged, rtol=1e-6, atol=1e-6)


def test_in_evaluation_it_is_merged_and_in_training_without_steps_too() -> None:
    model, x = blocks(), numbers(4, WIDTH)
    adapter = stir(MoSA(**ONE_PASS).attach(model))
    merged = model(x)
    steps = adapter.steps()
    assert not torch.equal(model(x), merged)
    assert torch.equal(model.eval()(x), merged)
    model.train()
    steps.close()
    assert torch.equal(model(x), merged)


def test_one_expert_is_the_standard_adapter_step_by_step() -> None:
    found = []
    for value in (MoSA(experts=1, **ONE_PASS), Bottleneck(bottleneck=5)):
        model, x = blocks(), numbers(8, WIDTH)
        adapter = value.attach(model)
        hook = value.run_hook(adapter)
        groups = optimizer_groups(model, learning_rate=1e-2, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups)
        losses = []
        for step in range(6):
            if isinstance(value, MoSA):
                hook.before_update(step + 1)  # type: ignore[attr-defined]
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, dict(adapter.named_parameters())))
    (mine, own), (theirs, other) = found
    assert mine == theirs
    assert mine[-1] < mine[0]
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("share", ["down", "up", "none"])
def test_packed_entries_are_a_copy_of_the_matrix_for_each_expert(share: str) -> None:
    """After some steps of SGD: of E full copies, where gradients are masked."""
    value = MoSA(experts=3, share=share, **ONE_PASS)  # type: ignore[arg-type]
    model, x = blocks().double(), numbers(8, WIDTH, dtype=torch.float64)
    adapter = value.with_fields(exclude=("1",)).attach(model)
    [layer] = layers_of(adapter)
    steps = adapter.steps()
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.5)
    target = x.roll(1, 1)
    with torch.no_grad():
        z = model[0].plain(x)
    copies, owned = {}, {}
    for which in ("down", "up"):
        split = which in value.split_matrices
        owned[which] = masks(layer, which).double() if split else torch.ones(1, 1, 1)
        copies[which] = layer.mean_matrix(which).detach().repeat(len(owned[which]), 1, 1)
    biases = [torch.zeros(5, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)]
    for _ in range(12):
        chosen = {"down": 0, "up": 0}
        for place, which in enumerate(("down", "up")):
            if which in value.split_matrices:
                chosen[which] = int(layer._drawn[place, 0].argmax())
        (model[0](x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.update()
        own = [copies[w][chosen[w]].clone().requires_grad_() for w in ("down", "up")]
        both = [each.requires_grad_() for each in biases]
        hidden = F.gelu(F.linear(z, own[0], both[0]), approximate="tanh")
        y = z + F.linear(hidden, own[1], both[1])
        grads = torch.autograd.grad((y - target).square().mean(), [*own, *both])
        with torch.no_grad():
            for which, gradient in zip(("down", "up"), grads[:2], strict=True):
                mask = owned[which][chosen[which]]
                copies[which][chosen[which]] -= 0.5 * gradient * mask
            biases = [b.detach() - 0.5 * g for b, g in zip(both, grads[2:], strict=True)]
    for which in ("down", "up"):
        close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8}
        torch.testing.assert_close(layer.mean_matrix(which), copies[which].mean(0), **close)
        for each, row in enumerate(torch.eye(3) if len(copies[which]) > 1 else ()):
            torch.testing.assert_close(
                layer.matrix(which, row.tolist()), copies[which][each], **close
            )


def test_draws_depend_on_seed_update_layer_and_matrix_and_on_nothing_else() -> None:
    value = MoSA(share="none", bottleneck=5, **BEHIND)

    def drawn(seed: int, name: str = "default") -> list[Tensor]:
        torch.rand(1)
        adapter = value.attach(blocks(), seed=seed, name=name)
        steps, found = adapter.steps(), []
        for _ in range(20):
            found.append(torch.stack([layer._drawn.argmax(-1) for layer in layers_of(adapter)]))
            steps.update()
        resumed = value.attach(blocks(), seed=seed).steps()
        resumed.load_state_dict({"updates": 7})
        assert torch.equal(
            torch.stack([layer._drawn.argmax(-1) for layer in resumed.layers]),  # type: ignore[attr-defined]
            found[7],
        )
        return found

    first = torch.stack(drawn(0))  # [updates, layers, matrices, passes]
    assert torch.equal(first, torch.stack(drawn(0, "other")))
    assert not torch.equal(first, torch.stack(drawn(1)))
    streams = first.flatten(1).T
    assert len({tuple(stream) for stream in streams.tolist()}) == 8
    assert set(first.flatten().tolist()) == {0, 1, 2, 3}


def test_of_two_passes_each_has_its_expert_and_others_are_idle() -> None:
    value = MoSA(share="none", bottleneck=5, **BEHIND)
    model, x = blocks(), numbers(6, 3, WIDTH)
    adapter = stir(value.with_fields(exclude=("1",)).attach(model))
    [layer] = layers_of(adapter)
    steps = adapter.steps()
    with torch.no_grad():
        z = model[0].plain(x)
    for _ in range(6):
        found = model[0](torch.cat([x, x])).chunk(2)
        drawn = layer._drawn.argmax(-1)
        for number, outputs in enumerate(found):
            own = [layer.matrix(w, torch.eye(4)[drawn[i, number]].tolist())
                   for i, w in enumerate(("down", "up"))]  # fmt: skip
            biases = [layer.get_parameter(f"{which}_bias") for which in ("down", "up")]
            hidden = F.gelu(F.linear(z, own[0], biases[0]), approximate="tanh")
            expected = z + F.linear(hidden, own[1], biases[1])
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        for place, which in enumerate(("down", "up")):
            idle = {e for e in range(4) if is_idle(layer.get_parameter(f"{which}_{e}"))}
            assert idle == set(range(4)) - set(drawn[place].tolist())
        steps.update()
    with pytest.raises(InputError, match="no batch of two passes"):
        model(x[:5])


def test_what_passes_disagree_by_is_both_divergences_and_each_pass_has_its_own_gradient() -> None:
    adapter = MoSA(consistency=0.5, **BEHIND).attach(blocks())
    steps = adapter.steps()
    assert isinstance(steps, ConsistentSteps)
    first, second = (numbers(4, 3, 7, name=name).requires_grad_() for name in ("one", "two"))
    labels = torch.tensor([[1, 2, -100]]).expand(4, 3)
    found = steps.pair_loss(first, second, SimpleNamespace(labels=labels))
    p, q = (logits[:, :2].detach().softmax(-1) for logits in (first, second))
    expected = 0.5 * 0.5 * ((p - q) * (p.log() - q.log())).sum()
    torch.testing.assert_close(found.detach(), expected)
    found.backward()
    alone = first.detach().requires_grad_()
    own = alone.log_softmax(-1)[:, :2]
    (0.25 * (own.exp() * (own - q.log())).sum()).backward()
    torch.testing.assert_close(first.grad, alone.grad)
    same = steps.pair_loss(first, first, SimpleNamespace(labels=labels))
    assert float(same.detach()) == 0.0


def test_recomputed_passes_draw_the_same() -> None:
    found = []
    for recompute in (False, True):
        model = llama()
        model.recompute = recompute
        adapter = stir(MoSA(bottleneck=3, dropout=0.3).attach(model))
        steps = adapter.steps()
        torch.manual_seed(1)
        with recomputing_in(lambda: steps.forward_context("recompute")):  # noqa: B023
            model(tokens(4).repeat(2, 1)).square().sum().backward()
        found.append([value.grad for value in adapter.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("place", ["after", "parallel"])
def test_it_reads_what_its_module_gives_or_reads(place: str) -> None:
    model, ids, scale = llama(), tokens(), 0.25
    value = MoSA(targets=("layers.0.mlp",), bottleneck=3, place=place, scale=scale)  # type: ignore[arg-type]
    adapter = stir(value.attach(model))
    [layer], mlp, seen = layers_of(adapter), model.get_submodule("model.layers.0.mlp"), []
    mlp.register_forward_hook(lambda module, given, output: seen.extend((given[0], output)))
    model(ids)
    given, output = seen
    base = mlp.plain(given)
    read = given if place == "parallel" else base
    hidden = F.gelu(layer.down(read), approximate="tanh")
    torch.testing.assert_close(output, base + scale * layer.up(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", ["down", "none"])
def test_exported_it_is_a_plain_adapter_with_the_same_logits(share: str, tmp_path: Path) -> None:
    model, ids = llama().eval(), tokens()
    value = MoSA(bottleneck=3, share=share, also=("*norm*",))  # type: ignore[arg-type]
    adapter = stir(value.attach(model, seed=4))
    logits = model(ids)
    plain = MoSA.plain(adapter)
    assert torch.equal(model(ids), logits)
    assert not adapter.active
    assert isinstance(plain.method, MoSA)
    assert plain.method.experts == 1
    own = {name.rpartition(".")[2] for name in plain.state_dict() if "copy_" not in name}
    assert own == {f"{which}_{part}" for which in ("down", "up") for part in ("matrix", "bias")}
    plain.save(tmp_path / "plain")
    other = llama().eval()
    load(other, tmp_path / "plain")
    assert torch.equal(other(ids), logits)
    # The standard adapter's own class takes the same tensors.
    behind = blocks()
    mine = stir(MoSA(bottleneck=5, share=share, **BEHIND).attach(behind))  # type: ignore[arg-type]
    expected, state = behind(numbers(4, WIDTH)), MoSA.plain(mine).state_dict()
    standard = blocks()
    Bottleneck(bottleneck=5).attach(standard).load_state_dict(state)
    assert torch.equal(standard(numbers(4, WIDTH)), expected)


@pytest.mark.parametrize(("split", "least"), [("rows", 5), ("columns", 5), ("entries", 45)])
def test_more_experts_than_there_is_to_deal_are_refused(split: str, least: int) -> None:
    model = blocks()
    fields: Any = {**ONE_PASS, "share": "none", "split": split}
    with pytest.raises(InputError, match=f"more than the {least} {split} of a matrix of 0"):
        MoSA(experts=least + 1, **fields).attach(model)
    assert not any("layers_by_adapter" in name for name, _ in model.named_modules())
    MoSA(experts=least, **fields).attach(model)


def test_two_passes_double_the_rows_that_a_plan_counts() -> None:
    assert "pairs_passes" in MoSA().traits
    assert "pairs_passes" not in MoSA(passes=1).traits
    assert "pair_loss" not in MoSA(passes=1, **BEHIND).attach(blocks()).steps().members


class Task:
    def outputs(self, model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(batch.input_ids)
        return logits

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(
            outputs.flatten(0, 1).float(), batch.labels.flatten(), reduction="sum"
        )


def trained(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Weights and step counters after updates of two passes, of ranks that share each batch."""
    layout = Layout.of(ranks.size, ranks.size)
    strategy = {
        "alone": Strategy,
        "ddp": lambda: Replicated(ranks, Layout.of(ranks.size), bucket_bytes=400),
        "zero": lambda: Zero(ranks),
        "fsdp": lambda: Sharded(ranks, layout),
    }[kind]()
    with on_meta():
        model = Llama(LLAMA)
        adapter = MoSA(bottleneck=3, share="none").attach(model, seed=1)
    strategy.cut(model, model.model.layers, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    adapter.initialise(ranks=ranks)
    strategy.start(model)

    def groups(decay: float) -> list[dict[str, Any]]:
        named = dict(strategy.trained(model))
        return optimizer_groups(model, learning_rate=1e-2, weight_decay=decay, trained=named)

    context = StepContext(model, 0, task=Task(), strategy=strategy, groups=groups, clip_norm=1.0)
    optimizer = torch.optim.AdamW(groups(0.1))
    program = StandardStep(context, optimizer)
    program.hooks.add("adapter", adapter.method.run_hook(adapter))
    ids = tokens(4)
    mine = ids[ranks.rank :: ranks.size]
    for step in range(1, 5):
        batches = Batch(mine[:, :-1], mine[:, 1:]).split(1)
        outcome = program(step, batches, ids[:, 1:].numel(), lambda: None)
        assert outcome.extra_loss is not None
    strategy.flush()
    strategy.rest(model)
    named = {name: whole(value.detach()).clone() for name, value in adapter.named_parameters()}
    state = [
        (name, int(optimizer.state[value]["step"]) if value in optimizer.state else 0)
        for group in optimizer.param_groups
        for name, value in zip(group["names"], group["params"], strict=True)
    ]
    return {"weights": named, "counters": dict(state)}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp"])
def test_ranks_draw_the_same_and_pass_over_the_same(pool: Pool, kind: str) -> None:
    expected = trained(Ranks(), "alone")
    assert len(set(expected["counters"].values())) > 2
    for found in pool.run(trained, kind, ranks=2):
        assert found["counters"] == expected["counters"]
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-3, atol=1e-4)


def under_torch_ddp(ranks: Ranks) -> list[tuple[bool, bool]]:
    """Of each update and expert: whether it was idle, and whether it stayed."""
    model = blocks()
    adapter = stir(MoSA(**ONE_PASS).attach(model))
    replica = DistributedDataParallel(model)
    optimizer, steps = torch.optim.AdamW(adapter.parameters(), lr=1e-2), adapter.steps()
    experts = [v for n, v in adapter.named_parameters() if n.rpartition("_")[2].isdigit()]
    found = []
    for step in range(5):
        before = [(value.detach().clone(), is_idle(value)) for value in experts]
        replica(numbers(4, WIDTH, name=f"{step} {ranks.rank}")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.update()
        pairs = zip(experts, before, strict=True)
        found += [(idle, torch.equal(value, then)) for value, (then, idle) in pairs]
    return found


@pytest.mark.ranks
def test_under_torch_s_own_ddp_idle_experts_stay(pool: Pool) -> None:
    first, second = pool.run(under_torch_ddp, ranks=2)
    assert first == second
    assert all(idle == stayed for idle, stayed in first)
    assert 0 < sum(idle for idle, _ in first) < len(first)
