"""What SALT promises exactly: its blocks, its forms, its ReLUs, its penalty and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import SALT, LoRA, SVFit, load
from modicum.adapters.deriving_layer import SAME_BASIS, mixed_fingerprint
from modicum.adapters.salt import SALTLayer
from modicum.core.contracts.method import Context
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.errors import InputError
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir
from modicum.proofs.contracts.base import checks

PRODUCTS = ("factored", "built")
RELUS = ("none", "diagonal", "all")


def layer_of(weight: Tensor, value: SALT) -> tuple[nn.Sequential, SALTLayer]:
    model = nn.Sequential(nn.Linear(*reversed(weight.shape), dtype=weight.dtype))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    [(_, layer)] = stir(value.attach(model)).layers()
    assert isinstance(layer, SALTLayer)
    return model, layer


def changed_values(layer: SALTLayer, relu: str) -> Tensor:
    """The changed S [q, q], by the paper's formula."""
    factors, k = layer.trained(), layer.method.split_of(layer.site)[0]
    top, rest = layer.singular[:k].diag(), layer.singular[k:].diag()
    if k:
        top = ((1 + factors["gain"]) * layer.singular[:k] + factors["shift"]).diag()
    if "X" in factors:
        rest = rest + factors["X"] @ factors["Y"]
    made = torch.block_diag(top, rest)
    if relu == "all":
        return made.relu()
    if relu == "diagonal":
        return made - made.diagonal().diag() + made.diagonal().relu().diag()
    return made


@pytest.mark.parametrize("top", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_output_and_gradients_are_those_of_the_rebuilt_weight(
    product: str, relu: str, top: float
) -> None:
    value = SALT(rank=3, top=top, relu=relu, product=product)
    weight = numbers(9, 12, dtype=torch.float64)
    model, layer = layer_of(weight, value)
    inputs = numbers(20, 12, dtype=torch.float64).requires_grad_()
    outputs = model(inputs)
    outputs.square().sum().backward()
    again = inputs.detach().clone().requires_grad_()
    rebuilt = layer.up @ changed_values(layer, relu) @ layer.down
    expected = F.linear(again, rebuilt, model[0].bias)
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-10)
    trained = layer.trained()
    gradients = torch.autograd.grad(expected.square().sum(), [*trained.values(), again])
    for name, one in zip([*trained, "inputs"], gradients, strict=True):
        found = inputs.grad if name == "inputs" else trained[name].grad
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(weight + layer.delta(), rebuilt, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("relu", RELUS)
def test_every_relu_starts_as_the_base_and_a_negative_value_is_removed(relu: str) -> None:
    model, inputs = odd_model(), numbers(4, 7)
    before = model(inputs)
    adapter = SALT(rank=2, relu=relu).attach(model)
    assert torch.equal(model(inputs), before)
    for _, layer in adapter.layers():
        assert isinstance(layer, SALTLayer)
        with torch.no_grad():
            layer.gain[0] = -1.5  # the first value becomes minus half of what it was
        along = layer.up[:, 0] @ (layer.layer.weight + layer.delta()) @ layer.down[0]
        left = -0.5 * layer.singular[0].item() if relu == "none" else 0.0
        assert along.item() == pytest.approx(left, abs=1e-5)


@pytest.mark.parametrize("shape", [(12, 12), (12, 7), (7, 12)])
def test_top_and_rest_do_not_mix_and_the_rank_is_that_of_both(shape: tuple[int, int]) -> None:
    _, layer = layer_of(numbers(*shape, dtype=torch.float64), SALT(rank=2))
    k, rest = layer.method.split_of(layer.site)
    assert k + rest == min(shape)
    delta, up, down = layer.delta(), layer.up, layer.down
    assert (up[:, :k].T @ delta @ down[k:].T).abs().max().item() < 1e-12
    assert (up[:, k:].T @ delta @ down[:k].T).abs().max().item() < 1e-12
    torch.testing.assert_close(
        up.T @ delta @ down.T,
        changed_values(layer, "none") - layer.singular.diag(),
        rtol=1e-10,
        atol=1e-10,
    )
    assert int(torch.linalg.matrix_rank(delta, rtol=1e-9)) == k + 2
    a, b, _ = layer.as_lora()
    assert a.shape[0] == b.shape[1] == k + 2


def test_with_every_direction_on_top_it_is_svfit() -> None:
    weight, inputs = numbers(9, 6), numbers(20, 6)
    model, layer = layer_of(weight, SALT(top=1.0))
    assert set(layer.trained()) == {"gain", "shift"}
    other = nn.Sequential(nn.Linear(6, 9))
    with torch.no_grad():
        for name in ("weight", "bias"):
            other[0].get_parameter(name).copy_(model.get_parameter(f"0.{name}"))
    [(_, its)] = SVFit(rank=6).attach(other).layers()
    with torch.no_grad():
        its.get_parameter("shift").copy_(layer.gain * layer.singular + layer.shift)
    torch.testing.assert_close(model(inputs), other(inputs), rtol=1e-6, atol=1e-6)


def test_with_none_on_top_it_is_a_lora_within_the_weights_directions() -> None:
    weight = numbers(9, 6)
    _, layer = layer_of(weight, SALT(rank=2, top=0.0))
    assert set(layer.trained()) == {"X", "Y"}
    delta = layer.up @ layer.X @ layer.Y @ layer.down
    torch.testing.assert_close(layer.delta(), delta)
    assert int(torch.linalg.matrix_rank(layer.delta(), rtol=1e-5)) == 2


@pytest.mark.parametrize(("top", "ks"), [(0.5, (4, 2)), (0.3, (2, 2)), (0.9, (6, 4)), (1, (7, 5))])
def test_numbers_are_two_a_top_direction_and_two_ranks_of_the_rest(
    top: float, ks: tuple[int, int]
) -> None:
    value = SALT(rank=1, top=top)
    adapter = value.attach(odd_model())
    for (_, layer), k, q in zip(adapter.layers(), ks, (7, 5), strict=True):
        assert sum(p.numel() for p in layer.parameters()) == 2 * k + 2 * (q - k)
        assert value.trained(layer.site) == 2 * k + 2 * (q - k)


def test_a_rank_above_what_top_leaves_is_refused() -> None:
    model = odd_model()
    with pytest.raises(InputError, match="above 3, the directions of wide that `top` leaves of 7"):
        SALT(rank=4).attach(model)
    assert type(model.get_submodule("wide")) is nn.Linear
    SALT(rank=4, top=1.0).attach(model)  # nothing is left that could have a rank


def test_a_zero_weight_and_embeddings_are_refused() -> None:
    model = odd_model()
    nn.init.zeros_(model.get_submodule("narrow").get_parameter("weight"))
    with pytest.raises(InputError, match="its weight is zero"):
        SALT(rank=2).attach(model)
    with pytest.raises(InputError, match="leave this one out"):
        SALT(rank=2, targets=("0",)).attach(nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6)))


def test_decay_draws_to_the_weight_and_gain_and_shift_have_a_rate_of_their_own() -> None:
    model, layer = layer_of(numbers(8, 8), SALT(rank=2, learning_rate=5.0))
    groups = optimizer_groups(model, learning_rate=0.1, weight_decay=0.5)
    rates = {name.rpartition(".")[2]: group for group in groups for name in group["names"]}
    assert {name: group["lr"] for name, group in rates.items()} == {
        "gain": 0.5,
        "shift": 0.5,
        "X": 0.1,
        "Y": 0.1,
    }
    optimizer = torch.optim.AdamW(groups)
    for factor in layer.parameters():
        factor.grad = torch.zeros_like(factor)
    before = {name: factor.clone() for name, factor in layer.trained().items()}
    optimizer.step()
    for name, factor in layer.trained().items():
        kept = 1 - rates[name]["lr"] * 0.5
        torch.testing.assert_close(factor, before[name] * kept)


def test_the_penalty_is_the_norms_of_both_changes() -> None:
    model = odd_model()
    adapter = SALT(rank=2, penalty=0.3).attach(model)
    [*layers] = (layer for _, layer in adapter.layers())
    first = [layer.term() for layer in layers]
    for term in first:  # at the start norms are zero, and so are their gradients
        term.backward()
    assert all(term.item() == pytest.approx(0.0, abs=1e-12) for term in first)
    assert all(bool(p.grad.isfinite().all()) for p in adapter.parameters() if p.grad is not None)
    stir(adapter)
    for layer in layers:
        factors, k = layer.trained(), layer.method.split_of(layer.site)[0]
        top = factors["gain"] * layer.singular[:k] + factors["shift"]
        expected = 0.3 * (top.norm() + (factors["X"] @ factors["Y"]).norm())
        torch.testing.assert_close(layer.term(), expected)


@pytest.mark.parametrize("name", ["count_once", "add_their_term_once", "resume"])
def test_with_a_penalty_it_follows_steps(name: str) -> None:
    value = SALT(rank=2, penalty=0.1)
    assert "follows_steps" in value.traits
    [check] = (each for each in checks("adapters") if each.name == f"steps_{name}")
    check.run(value)


def test_without_a_penalty_it_needs_no_steps() -> None:
    value = SALT(rank=2)
    assert "follows_steps" not in value.traits
    adapter = value.bind(Context(odd_model()))
    with pytest.raises(InputError, match="nothing to call"):
        adapter.steps()
    assert all(layer.term() is None for _, layer in adapter.layers())


@pytest.mark.expensive
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("relu", "top"), [("none", 0.5), ("diagonal", 0.5), ("all", 0.5), ("none", 0.0), ("none", 1.0)]
)
def test_every_form_spends_what_its_ledger_says(product: str, relu: str, top: float) -> None:
    value = SALT(rank=2, top=top, relu=relu, product=product)
    wanted = {"work", "activations", "parameters_and_bytes"}
    for check in checks("adapters"):
        if check.name in wanted:
            check.run(value)


def test_positions_decide_whether_the_change_is_built() -> None:
    [site] = SALT(rank=4).sites(nn.Sequential(nn.Linear(64, 64)))
    value = SALT(rank=4)
    assert not value.builds_for(site, 4, dropped=False)
    assert value.builds_for(site, 4096, dropped=False)
    assert not value.with_fields(product="factored").builds_for(site, 4096, dropped=False)
    assert value.with_fields(product="built").builds_for(site, 4, dropped=False)
    assert value.with_fields(top=1.0).builds_for(site, 1, dropped=False)  # as SVFit


def test_both_ways_drop_the_same_inputs() -> None:
    found = []
    for product in PRODUCTS:
        model = odd_model().double()
        adapter = stir(SALT(rank=2, product=product, dropout=0.5).attach(model))
        inputs = numbers(6, 7, dtype=torch.float64).requires_grad_()
        torch.manual_seed(0)
        outputs = model(inputs)
        outputs.square().sum().backward()
        found.append([outputs, inputs.grad, *(factor.grad for factor in adapter.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("relu", RELUS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_of_an_input_nothing_else_is_kept(dropout: float, product: str, relu: str) -> None:
    value = SALT(rank=3, relu=relu, product=product, dropout=dropout)
    model, _ = layer_of(numbers(16, 24), value)
    model.train()
    found = []
    for rows in (64, 128):
        with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
            model(numbers(rows, 24).requires_grad_()).sum()
        found.append(saved.total)
    # The difference is what rows cost; the other is d and the pair, whatever the rows are.
    assert found[1] - found[0] == 4 * 64 * 24 + bool(dropout) * 64 * 24 // 8
    assert found[0] < 2 * (found[1] - found[0])


@pytest.mark.parametrize("relu", RELUS)
def test_bf16_models_and_autocast_keep_its_bases(relu: str) -> None:
    model, inputs = odd_model(), numbers(6, 7)
    adapter = stir(SALT(rank=2, relu=relu).attach(model))
    expected = model(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(inputs).float(), expected, rtol=0.05, atol=0.05)
    model.to(torch.bfloat16)
    for _, layer in adapter.layers():
        assert layer.up.dtype == layer.down.dtype == layer.singular.dtype == torch.float32
    found = model(inputs.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("relu", RELUS)
def test_it_is_worth_a_lora_in_pefts_files(tmp_path: Path, relu: str) -> None:
    model, inputs = odd_model(), numbers(3, 7)
    stir(SALT(rank=2, relu=relu).attach(model)).save(tmp_path)
    other = odd_model()
    loaded = load(other, tmp_path)
    assert isinstance(loaded.method, LoRA)
    torch.testing.assert_close(other(inputs), model(inputs), rtol=1e-5, atol=1e-5)


def test_its_own_file_says_which_directions_it_is_for(tmp_path: Path) -> None:
    model, inputs = odd_model(), numbers(3, 7)
    stir(SALT(rank=2).attach(model)).save(tmp_path, form="modicum")
    again = odd_model()
    load(again, tmp_path)
    torch.testing.assert_close(again(inputs), model(inputs), rtol=1e-6, atol=1e-6)
    for change in (lambda weight: 2 * weight, lambda weight: weight.flip(0)):
        other = odd_model()
        with torch.no_grad():
            narrow = other.get_submodule("narrow").get_parameter("weight")
            narrow.copy_(change(narrow.clone()))
        with pytest.raises(InputError, match="what its state was trained with"):
            load(other, tmp_path)


def test_a_pair_of_directions_whose_signs_turn_is_another_one() -> None:
    _, layer = layer_of(numbers(9, 6), SALT(rank=2))
    turned = torch.ones(6)
    turned[4] = -1
    kept = layer.fingerprint
    values = dict(layer.derive(layer.layer.weight.detach()))
    torch.testing.assert_close(values["fingerprint"], kept)
    own = mixed_fingerprint(layer.up, layer.down)
    other = mixed_fingerprint(layer.up * turned, layer.down * turned[:, None])
    assert (own - other).abs().max().item() > SAME_BASIS


def test_on_a_decoder_its_factors_come_from_seed_and_name() -> None:
    first, second, other = (
        {n: p.clone() for n, p in SALT(rank=2).attach(llama(), seed=s).named_parameters()}
        for s in (3, 3, 4)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, other[name]) == (not name.endswith(".X"))
