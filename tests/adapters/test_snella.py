"""SNELLA: its change and gradients against ordinary operations, exact counts, shared entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import SNELLA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.importance import ImportanceSteps
from modicum.adapters.snella import SNELLALayer
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.traits import TraitHolder, clashes
from modicum.core.errors import InputError
from modicum.core.layers.largest import below_largest
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears import NF4Linear
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import distance, numbers

SNELL = {"share": "uniform", "softmax": False}


def on_one(
    ins: int = 9, outs: int = 7, dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[nn.Sequential, SNELLALayer]:
    """A model of one layer, with an adapter whose scalars are not where they began."""
    model = nn.Sequential(nn.Linear(ins, outs, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(numbers(outs, ins, name="W"))
    [(_, layer)] = SNELLA(**{"rank": 4, **fields}).attach(model).layers()
    assert isinstance(layer, SNELLALayer)
    with torch.no_grad():
        for name, value in (("a", 1.3), ("g", 0.7), ("b", -0.1)):
            if name in layer._parameters:
                layer.get_parameter(name).fill_(value)
    return model, layer


def kernel_of(layer: SNELLALayer) -> Tensor:
    """K [out, in], by exact distances and autograd's own operations."""
    p, q, _, *bend = layer.tensors()
    exact = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    heads = layer.method.heads
    made = sum(
        0.1 * (-1) ** head * torch.cdist(left, right, **exact)
        for head, (left, right) in enumerate(zip(q.chunk(heads, 1), p.chunk(heads, 1), strict=True))
    )
    if bend:
        a, g, b = bend
        made = made + a * torch.softmax(made / g, 0) + b
    return made


def change_of(layer: SNELLALayer) -> Tensor:
    """D, of the same."""
    kernel = kernel_of(layer)
    sizes = kernel.detach().abs()
    kept = sizes.flatten().sort(descending=True).values[: int(layer.kept)]
    gained = kernel * sizes if layer.method.gain == "abs" else kernel
    return torch.where(sizes >= kept.min(), gained, 0.0)


@pytest.mark.parametrize(
    "fields", [{}, SNELL, {"gain": "one"}, {"heads": 4}, {"heads": 1, "softmax": False}], ids=str
)
@pytest.mark.parametrize("size", [(9, 7), (3, 11), (1, 6)])
def test_outputs_and_gradients_are_the_plain_branchs(
    size: tuple[int, int], fields: dict[str, Any]
) -> None:
    model, layer = on_one(*size, **fields)
    layer.kept.fill_(size[0] * size[1] * 2 // 3)
    found = []
    for build in (True, False):
        x = numbers(5, size[0], name="x", dtype=torch.float64).requires_grad_()
        change = change_of(layer)
        plain = x @ (model[0].weight + change).T + model[0].bias
        outputs = model(x) if build else plain
        outputs.square().sum().backward()
        gradients = []
        for factor in layer.parameters():
            gradients.append(factor.grad)
            factor.grad = None
        found.append((outputs, x.grad, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.delta(), change, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", [{"dropout": 0.4}, {"drop_path": 0.5}, {"dropout": 0.3} | SNELL])
def test_what_is_dropped_is_what_the_change_does_not_see(how: dict[str, float]) -> None:
    model, layer = on_one(**how)
    x = numbers(6, 3, 9, name="x", dtype=torch.float64).requires_grad_()
    torch.manual_seed(0)
    outputs = model(x)
    outputs.square().sum().backward()
    found = x.grad, layer.P.grad
    x.grad = layer.P.grad = None
    torch.manual_seed(0)
    if "dropout" in how:
        seen = torch.nn.functional.dropout(x.flatten(0, 1), how["dropout"]).view(x.shape)
    else:
        seen = x * torch.nn.functional.dropout(torch.ones(6, dtype=x.dtype), 0.5)[:, None, None]
        assert 0 < int((seen == 0).flatten(1).all(1).sum()) < 6, "a full row is dropped, or none"
    plain = x @ model[0].weight.T + model[0].bias + seen @ change_of(layer).T
    torch.testing.assert_close(outputs, plain)
    plain.square().sum().backward()
    torch.testing.assert_close(found, (x.grad, layer.P.grad))
    model.eval()
    merged = x @ (model[0].weight + layer.delta()).T + model[0].bias
    torch.testing.assert_close(model(x), merged)


@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.7, 0.995])
@pytest.mark.parametrize("size", [(64, 48), (7, 13)])
def test_the_share_of_zeros_is_rho(size: tuple[int, int], zeros: float) -> None:
    _, layer = on_one(*size, torch.float32, zeros=zeros, share="uniform")
    found = (layer.delta() == 0).double().mean().item()
    assert abs(found - zeros) <= 1 / (size[0] * size[1])


def test_with_nothing_zero_and_no_gain_the_change_is_the_kernel() -> None:
    for fields in ({}, SNELL):
        _, layer = on_one(zeros=0.0, gain="one", **fields)
        torch.testing.assert_close(layer.delta(), kernel_of(layer))


def test_of_a_threshold_as_many_as_are_asked_for_are_above() -> None:
    sizes = numbers(11, 13).abs()
    for kept in (0, 1, 50, 142, 143):
        limit = below_largest(sizes, torch.tensor([kept]))
        assert int((sizes > limit).sum()) == kept
    tied = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert below_largest(tied, torch.tensor([2])).tolist() == [1.0]


def test_codes_that_are_the_same_have_finite_gradients() -> None:
    model, layer = on_one(zeros=0.0)
    with torch.no_grad():
        layer.P.zero_()
        layer.Q.zero_()
        layer.Q[0].fill_(1.0)
    model(numbers(5, 9, dtype=torch.float64)).square().sum().backward()
    for factor in layer.parameters():
        assert bool(factor.grad.isfinite().all())
    assert bool(layer.Q.grad[0].any())
    assert not bool(layer.Q.grad[1:].any()), "of a distance of zero a gradient has a direction"


def test_it_begins_where_the_paper_says() -> None:
    model = nn.Sequential(nn.Linear(400, 100))
    [(_, layer)] = SNELLA(rank=16).attach(model).layers()
    for name, width in (("P", 400), ("Q", 100)):
        factor, bound = layer.get_parameter(name), (width * 8) ** -0.5
        assert factor.shape == (width, 16)
        assert 0.98 * bound < float(factor.detach().abs().max()) <= bound
    assert [layer.get_parameter(name).item() for name in "agb"] == [1.0, 1.0, 0.0]
    groups = optimizer_groups(model, learning_rate=1.0, weight_decay=0.5)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert sorted(decays.values()) == [0.0, 0.0, 0.0, 0.5, 0.5], "scalars decay, or codes do not"


@pytest.mark.parametrize("fields", [{}, SNELL, {"dropout": 0.2}])
def test_nothing_of_a_matrixs_size_is_kept(fields: dict[str, Any]) -> None:
    model, _ = on_one(64, 48, torch.float32, **fields)
    x = numbers(8, 64).requires_grad_()
    with saved_bytes((*model.parameters(), *model.buffers())) as kept:
        model(x).sum()
    bits = 8 * 64 // 8 if "dropout" in fields else 0
    assert kept.total == 4 * 8 * 64 + 4 + bits  # x, the threshold, dropout's mask


def test_quantized_bases_are_as_their_dense_weights() -> None:
    exact = numbers(64, 32, name="W")
    model = nn.Sequential(NF4Linear.from_dense(exact))
    [(_, layer)] = SNELLA(rank=4).attach(model).layers()
    x = numbers(5, 32)
    weight = model[0].to_dense() + layer.delta()
    assert distance(model(x), x @ weight.T) < 1e-5


# Sharing


def several(seed: int = 0, **fields: Any) -> AttachedAdapter:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 3))
    value = SNELLA(**{"rank": 4, "every": 2, "falling": 8, "zeros": 0.6, **fields})
    return value.attach(model, seed=seed)


def updates(adapter: AttachedAdapter, steps: Any, count: int, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(adapter.parameters(), lr=0.1)
    for _ in range(count):
        adapter.model(numbers(9, 6)).square().sum().backward()
        optimizer.step()
        steps.update()
        optimizer.zero_grad()


def kept_of(adapter: AttachedAdapter) -> list[int]:
    return [int(layer.get_buffer("kept")) for _, layer in adapter.layers()]


def test_kept_entries_are_the_budget_and_no_layer_has_more_than_it_can() -> None:
    adapter = several(zeros_first=0.1, warmup=2)
    steps, total = adapter.steps(), 6 * 20 + 20 * 20 + 20 * 3
    caps = [layer.site.elements for _, layer in adapter.layers()]
    assert kept_of(adapter) == [cap - round(0.1 * cap) for cap in caps]
    seen = []
    for update in range(2, 15, 2):
        updates(adapter, steps, 2)
        left = 1 - min(1.0, max(0, update - 2) / 8)
        zeros = 0.6 + (0.1 - 0.6) * left**3
        found = kept_of(adapter)
        assert sum(found) == total - round(zeros * total)
        assert all(0 <= count <= cap for count, cap in zip(found, caps, strict=True))
        alive = [int((layer.delta() != 0).sum()) for _, layer in adapter.layers()]
        assert all(abs(a - b) <= 1 for a, b in zip(alive, found, strict=True))
        seen.append(sum(found))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == total - round(0.6 * total)
    parts = [count / cap for count, cap in zip(kept_of(adapter), caps, strict=True)]
    assert max(parts) - min(parts) > 0.1, "every layer has the same share"


def test_scores_are_the_mean_products_of_both_running_numbers() -> None:
    adapter = several(every=3)
    steps = adapter.steps()
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    running: dict[str, tuple[Tensor, Tensor]] = {}
    for _ in range(2):
        adapter.model(numbers(9, 6)).square().sum().backward()
        optimizer.step()
        for name, factor in adapter.named_parameters():
            assert factor.grad is not None
            size = (factor.detach() * factor.grad).abs()
            mean, spread = running.get(name, (torch.zeros_like(size), torch.zeros_like(size)))
            mean = 0.85 * mean + 0.15 * size
            running[name] = mean, 0.85 * spread + 0.15 * (size - mean).abs()
        steps.update()
        optimizer.zero_grad()
    assert isinstance(steps, ImportanceSteps)
    for site, score in steps.scores().items():
        parts = [(mean * spread).mean().item() for mean, spread in (running[f"{site}.P"],)]
        parts += [(mean * spread).mean().item() for mean, spread in (running[f"{site}.Q"],)]
        assert score == pytest.approx(sum(parts), rel=1e-5)


def test_gradients_are_the_optimizers_where_it_has_masters() -> None:
    adapter, twin = several(), several()
    steps, others = adapter.steps(), twin.steps()
    names = {name: adapter.model_name(name) for name, _ in adapter.named_parameters()}
    for _ in range(2):
        twin.model(numbers(9, 6)).square().sum().backward()
        masters = {}
        for name, factor in twin.named_parameters():
            masters[names[name]] = factor.detach().clone().requires_grad_()
            masters[names[name]].grad = factor.grad
        optimizer = torch.optim.SGD([{"params": [*masters.values()], "names": [*masters]}], lr=0.0)
        others.after_optimizer(others.updates + 1, None)
        for factor in adapter.parameters():
            factor.grad = None
        steps.after_optimizer(steps.updates + 1, optimizer)
        twin.model.zero_grad()
    assert steps.scores() == others.scores()
    assert kept_of(adapter) == kept_of(twin)


def test_gradients_that_are_gone_are_missed() -> None:
    adapter = several()
    steps = adapter.steps()
    adapter.model(numbers(9, 6)).sum().backward()
    adapter.model.zero_grad()
    with pytest.raises(InputError, match="before gradients are set to zero"):
        steps.update()


def test_optimizers_that_use_gradients_up_are_refused_where_they_are_read() -> None:
    for fields, refused in (({}, True), ({"share": "uniform"}, False)):
        mine = TraitHolder("adapter", SNELLA(**fields).traits)
        other = TraitHolder("optimizer", frozenset({"frees_gradient_in_backward"}))
        assert bool(clashes([mine, other])) == refused
    with pytest.raises(InputError, match="counts nothing"):
        several(share="uniform").steps()


@pytest.mark.parametrize(
    ("fields", "said", "field"),
    [
        ({"rank": 5}, "2 heads do not divide it; the next that they do is 6", "rank"),
        ({"zeros_first": 0.7}, "above 0.6", "zeros_first"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str, field: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        several(**fields)
    assert error.value.field == field


def test_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
    with pytest.raises(InputError, match="this is an embedding"):
        SNELLA(targets=("0",)).attach(model)
    assert type(model[0]) is nn.Embedding


def test_files_keep_the_shares_and_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    adapter = several()
    updates(adapter, adapter.steps(), 8)
    adapter.save(tmp_path)
    other = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 3))
    again = load(other, tmp_path)
    assert kept_of(again) == kept_of(adapter)
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    [key] = [key for key in tensors if key.endswith("2.kept")]
    for count in (401, -1):
        save_file(tensors | {key: torch.tensor([count])}, file)
        fresh = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 3))
        with pytest.raises(InputError, match="cannot keep so many of its 400 entries"):
            load(fresh, tmp_path)
        assert type(fresh[0]) is nn.Linear


def shared_on(ranks: Ranks, sharded: bool, stop: int) -> tuple[list[int], dict[str, Any]]:
    """Six updates, after `stop` of them all again from a state; what is kept, and that state."""

    def begun() -> tuple[AttachedAdapter, Any]:
        adapter = several()
        adapter.ranks = ranks
        if sharded and not ranks.alone:
            from torch.distributed.fsdp import fully_shard

            fully_shard(adapter.model, mesh=Layout.of(ranks.size, ranks.size).mesh("cpu"))
        return adapter, adapter.steps()

    def full(state: dict[str, Any]) -> dict[str, Any]:
        return {k: whole(v).clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    adapter, steps = begun()
    updates(adapter, steps, stop)
    if stop < 6:
        again, later = begun()
        with torch.no_grad():
            for one, other in zip(again.parameters(), adapter.parameters(), strict=True):
                one.copy_(other)
            for (_, one), (_, other) in zip(again.layers(), adapter.layers(), strict=True):
                one.get_buffer("kept").copy_(other.get_buffer("kept"))
        later.load_state_dict(full(steps.state_dict()))
        adapter, steps = again, later
        updates(adapter, steps, 6 - stop)
    return kept_of(adapter), full(steps.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_share_alike_whether_factors_are_sharded_or_not(pool: Pool, sharded: bool) -> None:
    kept, state = shared_on(Ranks(), sharded, 6)
    for stop in (6, 3):
        for their_kept, theirs in pool.run(shared_on, sharded, stop):
            assert their_kept == kept
            assert theirs.keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(theirs[key], value, rtol=1e-4, atol=1e-8)
