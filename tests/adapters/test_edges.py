"""Layers that are not what they look like, and models that others have changed, hooked or saved."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from modicum.adapters import AttachedAdapter, LoRA, MoS, PiSSA, load
from modicum.adapters.base import Adapter
from modicum.adapters.merging import RoundingWarning
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import linear_form
from modicum.linears import NF4Linear
from modicum.memory import COMET
from modicum.proofs.contracts.adapters.subjects import numbers, odd_model, stir

METHODS: list[Adapter] = [
    LoRA(rank=2),
    PiSSA(rank=2),
    MoS(rank=2, equivalent_rank=2, private_rank=2, shards=1),
]
each_method = pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Alias(nn.Module):
    """Uses a weight in a way that its code does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in (self.proj, self.out):
            inputs = F.linear(inputs, layer.weight)
        return inputs


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.experts[1](inputs)
        return out


def pruned() -> nn.Module:
    layer: nn.Module = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    return layer


def shape(model: nn.Module) -> list[Any]:
    modules = [(name, type(module)) for name, module in model.named_modules()]
    values = [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()]
    return [modules, values, list(model.state_dict()), [m.__dict__.keys() for m in model.modules()]]


# Which layers


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda: Own(4, 4), "0", "Own is a subclass of Linear"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "0", "parametrized"),
        (pruned, "0", "a hook makes its weight"),
        (lambda: nn.LazyLinear(4), "0", "no weight yet"),
        (lambda: nn.Linear(4, 4).to(torch.float8_e4m3fn), "0", "its weight is float8_e4m3fn"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "0", "max_norm"),
        (lambda: nn.MultiheadAttention(4, 2), "0.out_proj", "MultiheadAttention uses its weight"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), "0.linear1", "TransformerEncoderLayer uses"),
    ],
)
def test_a_layer_that_may_compute_something_else_is_refused(
    make: Callable[[], nn.Module], name: str, why: str
) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 4))
    before = shape(model) if "Lazy" not in str(model) else None
    with pytest.raises(InputError, match=why) as error:
        LoRA(rank=1, targets=(name,)).attach(model)
    assert (error.value.field, error.value.value) == ("targets", name)
    if before is None:
        with pytest.raises(InputError, match=r"0\.weight"):
            LoRA(rank=1).attach(model)
    elif "Embedding" not in str(model):
        with pytest.warns(UserWarning, match="all-linear leaves out"):
            adapter = LoRA(rank=1).attach(model)
        assert set(adapter.sites) == {"1"}
        assert why in adapter.left_out[name]
        adapter.detach()
    assert before is None or shape(model) == before


def test_a_layer_of_a_decoder_layer_and_of_a_subclass_that_changes_nothing_is_taken() -> None:
    class Named(nn.Linear):
        pass

    model = nn.ModuleList([nn.TransformerDecoderLayer(4, 2, 8), Named(4, 4)])
    with pytest.warns(UserWarning, match="out_proj"):
        adapter = LoRA(rank=1).attach(model)
    assert set(adapter.sites) == {"0.linear1", "0.linear2", "1"}


def test_stacked_matrices_are_listed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with pytest.warns(UserWarning, match=r"\*\.weight_ih_l0") as caught:
        adapter = LoRA(rank=1).attach(model)
    assert caught[0].filename == __file__
    assert adapter.left_out == dict.fromkeys(
        ("1.weight_ih_l0", "1.weight_hh_l0"), "a matrix that is no linear layer"
    )


def test_a_layer_that_is_never_called_is_an_error_after_the_first_pass() -> None:
    model = nn.Sequential(Alias())
    LoRA(rank=1).attach(model)
    with pytest.raises(InputError, match="Alias ran without calling it") as error:
        model(numbers(2, 4))
    assert error.value.value == "0.proj"


def test_an_expert_that_got_nothing_is_a_warning() -> None:
    model = nn.Sequential(Experts())
    LoRA(rank=1).attach(model)
    with pytest.warns(UserWarning, match=r"did not reach 2 layers.*first is 0\.experts\.0"):
        model(numbers(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(numbers(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# What others do with the layer


def adapted(value: Adapter = METHODS[0], dtype: torch.dtype = torch.float32) -> AttachedAdapter:
    return stir(value.attach(odd_model(dtype=dtype)))


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_hooks_patches_biases_and_transforms_work_at_any_dropout(dropout: float) -> None:
    model, x = odd_model(), numbers(4, 7)
    seen: list[Tensor] = []
    layer = model.get_submodule("wide")
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    narrow = model.get_submodule("narrow")
    old = narrow.forward
    narrow.forward = lambda inputs: 3 * old(inputs)  # type: ignore[method-assign]
    adapter = stir(LoRA(rank=2, dropout=dropout).attach(model))
    assert isinstance(layer.bias, nn.Parameter)
    layer.bias.requires_grad_(True)
    output = model(x)
    output.sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.abs().sum() > 0
    inner = F.relu(seen[0]) if isinstance(model[1], nn.ReLU) else model[1](seen[0])
    factors = dict(adapter.layers())["narrow"]
    expected = 3 * F.linear(inner, narrow.weight) + inner @ factors.delta().T
    torch.testing.assert_close(output, expected)
    adapter.detach()
    torch.testing.assert_close(model(x), 3 * F.linear(model[1](layer(x)), narrow.weight))

    def function(given: Tensor) -> Tensor:
        return model(given).square().sum()

    again = stir(LoRA(rank=2, dropout=dropout).attach(model))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(torch.func.grad(function)(x.detach()), slope)
    _, change = torch.func.jvp(function, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(change, slope.sum())
    values = list(again.parameters())
    for at in (x, *values):
        (first,) = torch.autograd.grad(function(x), at, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), at)
        assert 0 < second.abs().sum() < torch.inf


def test_double_backward_is_right() -> None:
    model = odd_model().double()
    adapter = stir(LoRA(rank=2).attach(model))
    names = [name for name, value in model.named_parameters() if value.requires_grad]

    def output(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, given, (x,))

    x = numbers(2, 7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(output, (x, *adapter.parameters()))


@each_method
def test_factors_have_the_precision_that_their_values_need(value: Adapter) -> None:
    exact = adapted(value, torch.float64)
    assert {p.dtype for p in exact.parameters()} == {torch.float64}
    half = adapted(value, torch.bfloat16)
    x = numbers(64, 7).bfloat16()
    for adapter in (exact, half):
        if adapter is exact:  # with the values that bf16 has
            adapter.load_state_dict({n: t.double() for n, t in half.state_dict().items()})
            for one, other in zip(adapter.model.parameters(), half.model.parameters(), strict=True):
                one.data.copy_(other.data)
        layer = adapter.model.get_submodule("wide")
        layer(x.to(layer.weight.dtype)).sum().backward()  # type: ignore[union-attr, arg-type]
    for one, other in zip(exact.parameters(), half.parameters(), strict=True):
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-6 * one.grad.norm()
    before = exact.model.get_submodule("wide").get_parameter("weight").clone()
    exact.merge()
    exact.unmerge()
    assert torch.equal(exact.model.get_submodule("wide").get_parameter("weight"), before)


# Failures


@each_method
@pytest.mark.parametrize("name", ["train", "keys", "a.b", "", "first"])
def test_a_name_that_cannot_be_is_refused(value: Adapter, name: str) -> None:
    model = odd_model()
    LoRA(rank=1).attach(model, name="first")
    before = shape(model)
    with pytest.raises(InputError):
        value.attach(model, name=name)
    assert shape(model) == before


def test_any_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = odd_model()
    model.get_submodule("narrow").get_parameter("weight").data[0, 0] = torch.nan
    first = LoRA(rank=1).attach(model, name="first")
    before, weights = shape(model), copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="not finite") as error:
        PiSSA(rank=1).attach(model, name="second")
    assert error.value.value == "narrow"
    for wrong in (OSError("disk"), KeyboardInterrupt()):

        def reader(name: str, wrong: BaseException = wrong) -> Tensor:
            if name == "narrow":
                raise wrong
            return torch.ones(13, 7)

        with pytest.raises(type(wrong)):
            PiSSA(rank=1).attach(model, name="second", weights=reader)
    assert shape(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), weights[name].nan_to_num()), name
    assert all(parameter.requires_grad for parameter in first.parameters())


def test_the_base_is_frozen_until_the_last_adapter_goes() -> None:
    model = odd_model()
    model.get_submodule("narrow").requires_grad_(False)

    def trained() -> set[int]:
        return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    before = trained()
    first, second = (LoRA(rank=1).attach(model, name=name) for name in ("first", "second"))
    own = {id(parameter) for parameter in second.parameters()}
    first.detach()
    assert trained() == own
    second.detach()
    assert trained() == before


def test_of_a_part_with_an_adapter_of_its_own_the_base_is_trained_again_too() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    part = LoRA(rank=1).attach(model[0], name="part")
    full = LoRA(rank=1).attach(model, name="full")
    part.detach()
    assert not model.get_parameter("0.0.weight").requires_grad
    full.detach()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_detached_handle_does_nothing_to_a_later_adapter_of_its_name() -> None:
    model, x = odd_model(), numbers(4, 7)
    old = LoRA(rank=1).attach(model)
    old.detach()
    new = stir(LoRA(rank=2).attach(model))
    output = model(x)
    old.detach()
    old.close()
    assert (new.active, old.active) == (True, False)
    assert torch.equal(model(x), output)
    uses: list[Callable[[], object]] = [old.merge, old.activate, lambda: old.weighting]
    for use in uses:
        with pytest.raises(InputError, match="the adapter was detached"):
            use()
    assert torch.equal(model(x), output)


def test_what_has_no_values_is_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    adapter = LoRA(rank=1).attach(model)
    with pytest.raises(InputError, match="meta"):
        adapter.save(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


# State dicts of the whole model


@each_method
def test_a_state_dict_is_that_of_the_plain_model_and_the_factors(value: Adapter) -> None:
    plain, x = odd_model(), numbers(4, 7)
    adapter = adapted(value)
    state = copy.deepcopy(adapter.model.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)
    factors = {name for name in state if name not in plain.state_dict()}
    assert all("layers_by_adapter" in name or "shared_by_" in name for name in factors)
    assert set(plain.load_state_dict(state, strict=False).unexpected_keys) == factors
    output = adapter.model(x)
    again = value.attach(odd_model(), seed=9)
    again.model.load_state_dict(state)
    torch.testing.assert_close(again.model(x), output, rtol=0, atol=1e-6)
    adapter.model.load_state_dict(state)
    assert torch.equal(adapter.model(x), output)
    copied = copy.deepcopy(adapter.model)
    assert torch.equal(copied(x), output)
    assert [type(m) for m in copied.modules()] == [type(m) for m in adapter.model.modules()]


def test_the_plain_models_file_can_be_loaded_beneath_an_adapter() -> None:
    adapter, x = adapted(PiSSA(rank=2)), numbers(4, 7)
    change = {name: layer.delta() for name, layer in adapter.layers()}
    other = odd_model()
    with torch.no_grad():
        other.get_submodule("wide").get_parameter("weight").mul_(2)
    adapter.model.load_state_dict(other.state_dict(), strict=False)
    with torch.no_grad():
        for name, delta in change.items():
            other.get_submodule(name).get_parameter("weight").add_(delta)
    torch.testing.assert_close(adapter.model(x), other(x), rtol=1e-5, atol=1e-5)


def test_a_quantized_base_has_no_state_dict_of_a_plain_model() -> None:
    model = nn.Sequential(NF4Linear(8, 6), nn.Linear(6, 4))
    for module in model:
        for parameter in module.parameters():
            parameter.data.zero_()
    keys = list(model.state_dict())
    adapter = LoRA(rank=1).attach(model)
    with pytest.raises(InputError, match=r"adapter\.save\(folder\), or merge") as error:
        model.state_dict()
    assert error.value.value == "0"
    adapter.detach()
    assert list(model.state_dict()) == keys


# Models of transformers


def gemma() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=29, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def test_scaled_embeddings_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model, ids = gemma(), torch.tensor([[0, 3, 5, 7, 0, 2]])
    adapter = stir(LoRA(rank=2, targets=("embed_tokens",)).attach(model))
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["embed_tokens"])
    theirs = peft.get_peft_model(gemma(), config)
    layer = theirs.get_submodule("base_model.model.model.embed_tokens")
    ours = dict(adapter.layers())["model.embed_tokens"]
    layer.lora_embedding_A["default"].data.copy_(ours.A)
    layer.lora_embedding_B["default"].data.copy_(ours.B)
    outputs = [one(input_ids=ids).logits for one in (model, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    gradient = layer.lora_embedding_A["default"].grad
    torch.testing.assert_close(ours.A.grad, gradient, rtol=1e-4, atol=1e-5)
    assert ours.A.grad is not None
    assert not ours.A.grad[:, 0].any()
    adapter.merge()
    torch.testing.assert_close(model(input_ids=ids).logits, outputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@each_method
def test_a_folder_of_save_pretrained_is_read_again(value: Adapter, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, ids = gemma(), torch.tensor([[3, 5, 7, 2]])
    base = model(input_ids=ids).logits
    adapter = stir(value.attach(model))
    output = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    again = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, base, rtol=1e-5, atol=1e-5)
    restored = load(again, tmp_path)
    assert (restored.method.info, restored.sites.keys()) == (value.info, adapter.sites.keys())
    torch.testing.assert_close(again(input_ids=ids).logits, output, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no adapter of this name") as error:
        load(gemma(), tmp_path, name="other")
    assert "default" in str(error.value.allowed)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_merged_is_not_put_on_the_merged_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, ids = gemma(), torch.tensor([[3, 5, 7, 2]])
    adapter = stir(LoRA(rank=2).attach(model))
    adapter.merge()
    output = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    again = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, output, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="count twice"):
        load(again, tmp_path)
    state = copy.deepcopy(model.state_dict())
    adapter.unmerge()
    with pytest.raises(InputError, match="is merged into the weights"):
        model.load_state_dict(state)
    torch.testing.assert_close(model(input_ids=ids).logits, output, rtol=1e-4, atol=1e-4)


@each_method
def test_a_state_of_other_shapes_is_named_and_changes_nothing(value: Adapter) -> None:
    adapter, x = adapted(value), numbers(4, 7)
    output = adapter.model(x)
    wrong = {"wide.weight": torch.zeros(3, 7)}
    wrong |= {"wide.layers_by_adapter.default.A_0": torch.zeros(5, 7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for wide\.weight"):
        adapter.model.load_state_dict(wrong, strict=False)
    assert torch.equal(adapter.model(x), output)


def test_a_detached_model_has_no_hook_left_of_an_adapter_that_never_ran() -> None:
    model = odd_model()
    LoRA(rank=1).attach(model).detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_state_of_an_adapter_with_other_fields_is_refused() -> None:
    state = adapted(LoRA(rank=2, alpha=1.0)).model.state_dict()
    for value, field in ((LoRA(rank=2), "alpha"), (PiSSA(rank=2, alpha=1.0), None)):
        with pytest.raises(InputError, match="the state is of an") as error:
            value.attach(odd_model()).model.load_state_dict(state, strict=False)
        assert error.value.field == field


def test_a_patched_layer_of_another_library_is_called_through(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, x = odd_model(), numbers(4, 7)
    hook = accelerate.hooks.SequentialHook()
    accelerate.hooks.add_hook_to_module(model.get_submodule("wide"), hook)
    adapter = stir(LoRA(rank=2).attach(model))
    output = model(x)
    adapter.merge()
    torch.testing.assert_close(model(x), output, rtol=1e-5, atol=1e-5)
    adapter.detach()
    assert isinstance(model.get_submodule("wide").forward, partial)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(LoRA, "as in LoRA(rank=...)"), (COMET, "as in COMET(tolerance=...)")],
)
def test_a_field_without_its_name_is_one_sentence(kind: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"^{kind.__name__} takes its fields by name, ") as refused:
        kind(4)
    assert said in str(refused.value)
    assert str(refused.value).endswith("(found: 4)")


@pytest.mark.parametrize("form", ["bf16", "nf4", "also"])
def test_what_was_merged_first_is_not_taken_out_first(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16))
    if form == "nf4":
        model[0] = linear_form("nf4").from_dense(model[0].weight.detach(), None)
    if form == "bf16":
        model.to(torch.bfloat16)
    also = ("0.bias",) if form == "also" else ()
    value = LoRA(rank=2, targets=("0",), also=also)
    made = [value.attach(model, name=name) for name in ("first", "second")]
    with torch.no_grad():
        for place, parameter in enumerate(itertools.chain(*(one.parameters() for one in made))):
            parameter.add_(torch.randn(parameter.shape).to(parameter) * (1 + place))
    first, second = made
    first.activate()
    dense = torch.float32 if form == "nf4" else None
    inputs = torch.randn(3, 64, dtype=torch.bfloat16 if form == "bf16" else torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        first.merge(dense=dense)
        once = model(inputs)
        second.merge()
    both = model(inputs)
    with pytest.raises(InputError, match="unmerge what was merged later"):
        first.unmerge()
    assert torch.equal(model(inputs), both)
    second.unmerge()
    second.deactivate()
    torch.testing.assert_close(model(inputs), once, rtol=1e-5, atol=1e-4)
    first.unmerge()
    assert first.active
