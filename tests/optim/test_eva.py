"""Eva against dense algebra, its clip, its statistics, its state and what it spends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from modicum.adapters import LoRA
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.errors import InputError
from modicum.core.machine.memory import TensorMeter, tensor_bytes
from modicum.models import ModelConfig, create
from modicum.optim import SGD, Eva, TransformContext
from modicum.optim.eva import EvaRuntime
from modicum.optim.transform import TransformQuery


def gradient(runtime: EvaRuntime, index: int) -> Tensor:
    """A layer's gradient [out, in], with a bias [out, in + 1]."""
    layer = runtime.layers[index]
    matrix = runtime.parameters[layer.weight].grad.clone().flatten(1)
    if layer.bias is None:
        return matrix
    return torch.cat([matrix, runtime.parameters[layer.bias].grad.clone()[:, None]], 1)


def gradients(runtime: EvaRuntime) -> list[Tensor]:
    return [gradient(runtime, index) for index in range(len(runtime.layers))]


def solved(G: Tensor, a: Tensor, g: Tensor, damping: float, variant: str = "eva") -> Tensor:
    """The damped curvature's inverse times G, by solving the dense system; vec is row-major."""
    left = torch.eye(len(G)).to(G) if variant == "f" else torch.outer(g, g)
    curvature = torch.kron(left, torch.outer(a, a))
    curvature += damping * torch.eye(G.numel()).to(G)
    return torch.linalg.solve(curvature, G.flatten()).view_as(G)


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(12, 5, bias=bias),
        nn.Tanh(),
        nn.Linear(5, 4, bias=not bias),
    ).double()


def passed(model: nn.Module, batch: int = 6, seed: int = 0) -> None:
    """One forward and backward pass, of the mean of 16 losses a sample."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 1 + torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64)
    (4 * model(inputs).square().sum() / batch).backward()


def bound(model: nn.Module, **fields: Any) -> EvaRuntime:
    optimizer = SGD(model.parameters(), lr=0.1)
    return Eva(**fields).bind(TransformContext(model, optimizer=optimizer))


@given(
    out=st.integers(1, 6),
    width=st.integers(1, 6),
    batch=st.integers(1, 5),
    bias=st.booleans(),
    variant=st.sampled_from(["eva", "f", "s"]),
    damping=st.sampled_from([1e-3, 0.03, 10.0]),
    seed=st.integers(0, 999),
)
def test_it_is_the_inverse_of_the_dense_curvature(
    out: int, width: int, batch: int, bias: bool, variant: Any, damping: float, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(width, out, bias=bias).double()
    runtime = bound(layer, variant=variant, damping=damping, kl_clip=None)
    inputs = torch.randn(batch, width, dtype=torch.float64)
    layer(inputs).square().sum().backward()
    G = gradients(runtime)[0]
    runtime.apply()
    ((a, g),) = runtime.means.vectors
    assert len(a) == width + (bias and variant != "s")
    P = gradients(runtime)[0]
    torch.testing.assert_close(P, solved(G, a, g, damping, variant), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", ["eva", "f", "s"])
def test_convolutions_and_several_layers(bias: bool, variant: Any) -> None:
    model = network(bias)
    runtime = bound(model, variant=variant, kl_clip=None)
    passed(model)
    before = gradients(runtime)
    runtime.apply()
    after = gradients(runtime)
    assert len(after) == 3
    for P, G, (a, g) in zip(after, before, runtime.means.vectors, strict=True):
        torch.testing.assert_close(P, solved(G, a, g, 0.03, variant), rtol=1e-9, atol=1e-9)
        assert (P - G / 0.03).abs().max() > 1e-4 * P.abs().max()


def test_the_vectors_are_means_over_positions() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    runtime = bound(layer)
    inputs = torch.randn(4, 5, 3, dtype=torch.float64)
    output = layer(inputs)
    output.retain_grad()
    output.square().mean().backward()
    runtime.apply()
    ((a, g),) = runtime.means.vectors
    torch.testing.assert_close(a, torch.cat([inputs.mean((0, 1)), torch.ones(1).double()]))
    torch.testing.assert_close(g, output.grad.mean((0, 1)))


def test_the_vectors_of_s_are_means_of_the_gradient() -> None:
    layer = nn.Linear(3, 2).double()
    runtime = bound(layer, variant="s", kl_clip=None)
    layer(torch.randn(4, 3).double()).square().mean().backward()
    G, bias = layer.weight.grad.clone(), layer.bias.grad.clone()
    runtime.apply()
    ((a, g),) = runtime.means.vectors
    torch.testing.assert_close(a, G.mean(0))
    torch.testing.assert_close(g, G.mean(1))
    assert torch.equal(layer.bias.grad, bias)


def test_with_much_damping_nothing_is_left_but_the_scale() -> None:
    model = network()
    runtime = bound(model, damping=1e9, kl_clip=None)
    passed(model)
    before = gradients(runtime)
    runtime.apply()
    for P, G in zip(gradients(runtime), before, strict=True):
        torch.testing.assert_close(1e9 * P, G, rtol=1e-6, atol=0)


@pytest.mark.parametrize("zero", ["a", "g"])
def test_where_a_mean_is_zero_the_gradient_is_scaled(zero: str) -> None:
    layer = nn.Linear(3, 2, bias=False).double()
    runtime = bound(layer, kl_clip=None, damping=0.25)
    inputs = torch.randn(2, 3, dtype=torch.float64)
    weights = torch.randn(2, 2, dtype=torch.float64)
    (inputs if zero == "a" else weights)[1] = -(inputs if zero == "a" else weights)[0]
    (layer(inputs) * weights).sum().backward()
    G = layer.weight.grad.clone()
    runtime.apply()
    ((a, g),) = runtime.means.vectors
    assert (a if zero == "a" else g).abs().max() == 0
    assert torch.equal(layer.weight.grad, G * 4)


def test_a_bias_is_a_further_input_that_is_one() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(7, 3, dtype=torch.float64)
    layer, wide = nn.Linear(3, 2).double(), nn.Linear(4, 2, bias=False).double()
    with torch.no_grad():
        wide.weight.copy_(torch.cat([layer.weight, layer.bias[:, None]], 1))
    found = []
    for module, x in ((layer, inputs), (wide, F.pad(inputs, (0, 1), value=1.0))):
        runtime = bound(module)
        module(x).square().mean().backward()
        runtime.apply()
        found.append((gradients(runtime)[0], *runtime.means.vectors[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


# The clip


def inner(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("variant", ["eva", "f", "s"])
@pytest.mark.parametrize(("kappa", "active"), [(1e-6, True), (1e9, False)])
def test_the_kl_clip_bounds_the_change(variant: Any, kappa: float, active: bool) -> None:
    model = network()
    free = bound(copy.deepcopy(model), variant=variant, kl_clip=None)
    runtime = bound(model, variant=variant, kl_clip=kappa)
    runtime.context.optimizer.param_groups[0]["lr"] = 0.01
    for of in (runtime, free):
        passed(of.context.model)
    G = gradients(runtime)
    runtime.apply()
    free.apply()
    clipped, P = gradients(runtime), gradients(free)
    nu = min(1.0, math.sqrt(kappa / (inner(P, G) * 0.01**2)))
    assert (nu < 1) == active
    for one, other in zip(clipped, P, strict=True):
        torch.testing.assert_close(one, nu * other, rtol=1e-9, atol=0)
    # nu^2 bounds the quadratic form <P, F P>, of which <P, G> is the larger, damped one.
    assert inner(P, G) * 0.01**2 * nu**2 <= kappa * (1 + 1e-9)


@pytest.mark.parametrize("variant", ["eva", "f", "s"])
def test_a_clip_of_zero_keeps_the_norm(variant: Any) -> None:
    model = network()
    runtime = Eva(kl_clip=0.0, variant=variant).bind(TransformContext(model))
    passed(model)
    G = gradients(runtime)
    runtime.apply()
    P = gradients(runtime)
    assert inner(P, P) == pytest.approx(inner(G, G), rel=1e-9)
    assert inner(P, G) < inner(G, G)


def test_the_clip_takes_the_largest_learning_rate_as_it_is_now() -> None:
    scales = []
    for rates in ((0.1, 0.3), (0.3, 0.3), (0.1, 0.1)):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).double()
        groups = [{"params": [p], "lr": 1.0} for p in layer.parameters()]
        optimizer = SGD(groups)
        runtime = Eva(kl_clip=1e-9).bind(TransformContext(layer, optimizer=optimizer))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        layer(torch.ones(1, 3).double()).square().sum().backward()
        runtime.apply()
        scales.append(layer.weight.grad.norm().item())
    assert scales[0] == scales[1]
    assert scales[2] == pytest.approx(3 * scales[0])


def test_gradients_of_zero_stay_zero() -> None:
    for kl_clip in (None, 0.0, 1e-3):
        layer = nn.Linear(3, 2)
        runtime = bound(layer, kl_clip=kl_clip)
        (0 * layer(torch.ones(2, 3))).sum().backward()
        runtime.apply()
        assert not layer.weight.grad.any()


# Statistics of an update


def test_micro_batches_of_unequal_size_are_one_batch() -> None:
    inputs = torch.randn(9, 3, dtype=torch.float64)
    found = []
    for cuts in ((9,), (1, 5, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        runtime = bound(model)
        for _ in range(2):
            for part in inputs.split(cuts):
                (model(part).square().sum() / 9).backward()
            runtime.apply()
        found.append([*gradients(runtime), runtime.means.averages])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_recomputed_blocks_and_other_forward_passes_change_nothing() -> None:
    found = []
    for noisy in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        runtime = bound(block)
        inputs = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        if noisy:
            with torch.no_grad():
                block(5 * inputs)
            block(5 * inputs)
            with runtime.capturing(False):
                block(5 * inputs).sum().backward()  # a rehearsal
            block.zero_grad()
            checkpoint(block, inputs, use_reentrant=False).square().sum().backward()
        else:
            block(inputs).square().sum().backward()
        runtime.apply()
        found.append([*gradients(runtime), runtime.means.averages])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_masked_positions_do_not_count() -> None:
    found = []
    for padding in (0, 3):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).double()
        runtime = bound(layer)
        torch.manual_seed(1)
        inputs = torch.randn(2, 4, 3, dtype=torch.float64)
        padded = F.pad(inputs, (0, 0, 0, padding), value=7.0)
        mask = torch.arange(4 + padding).expand(2, -1) < 4
        with runtime.capturing(mask=mask):
            (layer(padded) * mask[..., None]).square().sum().backward()
        runtime.apply()
        found.append([*gradients(runtime), runtime.means.averages])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_tied_and_reused_layers_share_their_means() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.Tanh(), second)
    runtime = bound(model, kl_clip=None)
    assert len(runtime.layers) == 1
    inputs = torch.ones(2, 3, dtype=torch.float64)
    hidden = model[:2](inputs)
    model(inputs).square().sum().backward()
    G = gradients(runtime)[0]
    runtime.apply()
    ((a, g),) = runtime.means.vectors
    torch.testing.assert_close(a[:3], (inputs.mean(0) + hidden.mean(0)) / 2)
    torch.testing.assert_close(gradients(runtime)[0], solved(G, a, g, 0.03))


def test_layers_that_were_never_used_keep_their_gradient() -> None:
    torch.manual_seed(0)
    used, unseen, absent = (nn.Linear(3, 3).double() for _ in range(3))
    model = nn.ModuleList([used, unseen, absent])
    runtime = bound(model, kl_clip=None)
    # The weight is used, and not through its module.
    F.linear(used(torch.ones(2, 3).double()), unseen.weight).square().sum().backward()
    before = unseen.weight.grad.clone()
    scaled = used.weight.grad.clone()
    runtime.apply()
    assert torch.equal(unseen.weight.grad, before)
    assert absent.weight.grad is None
    assert not torch.equal(used.weight.grad, scaled)


def test_statistics_of_every_third_update() -> None:
    model = network()
    runtime = bound(model, every=3)
    kept = []
    for step in range(5):
        model.zero_grad()
        with runtime.capturing():
            passed(model, seed=step)
        runtime.apply()
        kept.append(runtime.means.averages.clone())
        assert not runtime.means.sums.any()
    assert torch.equal(kept[0], kept[2])
    assert not torch.equal(kept[2], kept[3])
    assert torch.equal(kept[3], kept[4])


def test_a_loss_scale_is_taken_out() -> None:
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).double()
        runtime = bound(layer)
        (scale * layer(torch.ones(2, 3).double()).square().sum()).backward()
        for parameter in layer.parameters():
            parameter.grad /= scale
        runtime.apply(loss_scale=scale)
        found.append([*gradients(runtime), runtime.means.averages])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_gradients_that_are_no_numbers_leave_the_averages() -> None:
    layer = nn.Linear(3, 2)
    runtime = bound(layer)
    layer(torch.ones(2, 3)).sum().backward()
    runtime.apply()
    before = runtime.means.averages.clone()
    layer.zero_grad()
    (layer(torch.ones(2, 3)) * torch.inf).sum().backward()
    runtime.apply()
    assert not layer.weight.grad.isfinite().all()
    assert torch.equal(runtime.means.averages, before)


def test_bf16_gradients_are_worked_on_in_fp32() -> None:
    model = network().float()
    low = copy.deepcopy(model).bfloat16()
    runtime, other = bound(model), bound(low)
    assert other.means.averages.dtype == torch.float32
    for one, two in zip(model.parameters(), low.parameters(), strict=True):
        two.grad = torch.randn_like(two)
        one.grad = two.grad.float()
    runtime.means.sums.uniform_(0.5, 1.5)
    other.means.sums.copy_(runtime.means.sums)
    runtime.apply()
    other.apply()
    for one, two in zip(model.parameters(), low.parameters(), strict=True):
        assert torch.equal(two.grad, one.grad.bfloat16())


# State


def trained(
    steps: range, state: tuple[Any, Any, Any] | None = None, **fields: Any
) -> tuple[Any, Any, Any]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    runtime = Eva(**fields).bind(TransformContext(model, optimizer=optimizer))
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        runtime.load_state_dict(state[2])
    for step in steps:
        passed(model, seed=step)
        runtime.apply()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), runtime.state_dict()))


@pytest.mark.parametrize("fields", [{}, {"every": 3}, {"variant": "f"}, {"variant": "s"}], ids=str)
def test_it_resumes_to_the_bit(fields: dict[str, Any]) -> None:
    whole = trained(range(6), **fields)
    resumed = trained(range(4, 6), trained(range(4), **fields), **fields)
    for name, value in whole[0].items():
        assert torch.equal(value, resumed[0][name])
    assert whole[2]["updates"] == resumed[2]["updates"] == 6
    assert sorted(whole[2]) == sorted(resumed[2])


def test_the_state_is_named_and_that_of_other_layers_is_refused() -> None:
    runtime = bound(network())
    state = runtime.state_dict()
    assert state["updates"] == 0
    assert {name: tuple(v.shape) for name, v in state.items() if name != "updates"} == {
        "0.weight.input_mean": (19,),
        "0.weight.output_gradient_mean": (3,),
        "3.weight.input_mean": (13,),
        "3.weight.output_gradient_mean": (5,),
        "5.weight.input_mean": (6,),
        "5.weight.output_gradient_mean": (4,),
    }
    with pytest.raises(InputError, match=r"means of other layers.*5\.weight"):
        runtime.load_state_dict({n: v for n, v in state.items() if not n.startswith("5.")})
    wrong = state | {"3.weight.input_mean": torch.zeros(12)}
    with pytest.raises(InputError, match=r"has shape \(12,\), this model's \(13,\)"):
        runtime.load_state_dict(wrong)


# Models and what it spends there

LLAMA = ModelConfig(
    vocabulary_size=29, width=16, layers=2, heads=4, kv_heads=2, mlp_width=24, context=32
)


def test_a_decoders_embedding_head_and_adapters() -> None:
    model = create(LLAMA, seed=0)
    names = [layer.name for layer in bound(model).layers]
    assert len(names) == 14
    assert all(name.startswith("model.layers.") for name in names)
    assert len(bound(model, exclude=("down_proj", "*q_proj")).layers) == 10
    LoRA(rank=2).attach(model)
    with pytest.raises(InputError, match="adapters freeze them"):
        bound(model)


def loss_of(model: nn.Module) -> Callable[[], Tensor]:
    ids = torch.randint(29, (3, 8), generator=torch.Generator().manual_seed(0))
    return lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("variant", ["eva", "f", "s"])
def test_the_ledger_says_what_the_state_takes(variant: Any) -> None:
    model = create(LLAMA, seed=0)
    runtime = bound(model, variant=variant)
    ledger = Eva(variant=variant).ledger(TransformQuery(trained_shapes(model)))
    sizes = [(layer.out_features, layer.in_features) for layer in runtime.layers]
    expected = 4 * sum(i + 1 + (o if variant != "f" else 0) for o, i in sizes)
    assert ledger.bytes("optimizer") == expected
    assert ledger.bytes("buffer") == expected
    state = [v for v in runtime.state_dict().values() if isinstance(v, Tensor)]
    assert tensor_bytes(state) == expected
    assert tensor_bytes([runtime.means.sums]) == expected
    assert ledger.wire == ()


def test_the_ledger_says_what_crosses_the_wire() -> None:
    shapes = trained_shapes(create(LLAMA, seed=0))
    payload = Eva().ledger(TransformQuery(shapes)).bytes("optimizer")
    (wire,) = Eva().ledger(TransformQuery(shapes, ranks=4)).wire
    assert (wire.collective, wire.bytes, wire.count) == ("all_reduce", 2 * payload * 3 // 4, 1)
    means, scalars = Eva().ledger(TransformQuery(shapes, ranks=4, shards=2)).wire
    assert (scalars.bytes, scalars.axis) == (14 * 2 * 4, "shard")
    assert means == wire
    (means, scalars) = Eva(variant="s").ledger(TransformQuery(shapes, ranks=4, shards=2)).wire
    assert (means.axis, means.bytes) == ("shard", payload)


def test_it_saves_no_activation_and_adds_no_matrix_product() -> None:
    plain, watched = create(LLAMA, seed=0), create(LLAMA, seed=0)
    runtime = bound(watched)
    saved, products = [], []
    for model in (plain, watched):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = loss_of(model)()
            loss.backward()
            if model is watched:
                runtime.apply()
        saved.append(sum(kept.values()))
        products.append(counter.get_total_flops())
    ledger = Eva().ledger(TransformQuery(trained_shapes(watched), positions=24))
    assert saved[0] == saved[1]
    assert products[0] == products[1]
    widths = {(layer.out_features, layer.in_features): 0 for layer in runtime.layers}
    assert widths.keys() == {(16, 16), (8, 16), (24, 16), (16, 24)}
    elements = sum(layer.out_features * layer.in_features for layer in runtime.layers)
    assert ledger.flops("step") == 7 * elements
    assert ledger.flops("backward") == 24 * sum(
        layer.out_features + layer.in_features for layer in runtime.layers
    )
    assert ledger.bytes("activation", "loss") == 4 * sum(at.in_features for at in runtime.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["eva", "f", "s"])
def test_the_workspace_of_a_step_is_no_more_than_the_ledger_says(
    dtype: torch.dtype, variant: Any
) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 64, bias=False)).to(dtype)
    runtime = bound(model, variant=variant)
    for _ in range(2):
        model(torch.ones(1, 200, dtype=dtype)).sum().backward()
        with TensorMeter("cpu") as meter:
            runtime.apply()
    said = Eva(variant=variant).ledger(TransformQuery(trained_shapes(model)))
    workspace = said.bytes("workspace", "step")
    assert 0 < meter.peak <= 1.05 * workspace
    if dtype == torch.bfloat16:
        assert meter.peak > 0.5 * workspace


def test_closing_leaves_nothing_behind() -> None:
    model = network()
    runtime = bound(model)
    runtime.close()
    passed(model)
    assert not runtime.means.sums.any()
    assert not any(module._forward_hooks for module in model.modules())
