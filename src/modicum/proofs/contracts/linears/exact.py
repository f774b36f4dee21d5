"""What a linear form computes: the product with the weight that it says it represents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.linear_forms import (
    DENSE,
    form_of,
    full_weight,
    why_not_dense,
    write_weight,
)
from modicum.core.random import normal_
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.linears.subjects import (
    LinearSubject,
    assert_close,
    assert_same,
    dense_check,
    form_of_value,
    layers,
    linears_check,
    numbers,
    small,
)


@dense_check()
def check_it_is_the_linear_map_of_its_weight(subject: LinearSubject) -> None:
    """In float64 a layer computes x W^T + b with the W that it says it represents."""
    for layer, weight, _ in layers(small(subject), torch.float64):
        dense, bias = full_weight(layer).double(), layer._parameters["bias"]
        assert dense.shape == weight.shape, f"of {[*weight.shape]} it makes {[*dense.shape]}"
        none = layer(numbers(0, weight.shape[1], dtype=torch.float64))
        assert none.shape == (0, weight.shape[0]), f"no inputs give outputs of {[*none.shape]}"
        for shape in ((), (4,), (2, 3)):
            x = numbers(*shape, weight.shape[1], dtype=torch.float64)
            assert_close(layer(x), F.linear(x, dense, bias), 1e-6, f"inputs {[*x.shape]}")


@dense_check()
def check_what_it_represents_it_keeps(subject: LinearSubject) -> None:
    """A layer made of the weight that another represents represents it too, to 1e-5."""
    form = form_of_value(small(subject))
    for layer, weight, arguments in layers(small(subject)):
        if isinstance(layer, FormLayer) and not layer.projects:
            raise NotApplicable("what the form makes of a weight is another one each time")
        held = full_weight(layer).detach()
        again = form.round_trip(held, **arguments)
        scale = held.norm().item() or 1.0
        gap = (again - held).norm().item() / scale
        assert gap < 1e-5, f"{[*weight.shape]}: made of what it represents it is off by {gap:.2g}"
        if form.exact:
            assert torch.equal(held, weight), "it claims to be exact, and changes the weight"


@linears_check()
def check_it_knows_its_layers(subject: LinearSubject) -> None:
    """A layer is known as one of its form, and gives the arguments that it was made with."""
    form = form_of_value(small(subject))
    for layer, _, arguments in layers(small(subject)):
        assert form_of(layer) is form, "the form does not know its layers"
        assert dict(form.arguments(layer)) == arguments, "a layer tells other arguments"


@linears_check(needs=("has_no_dense_weight",))
def check_it_says_why_it_has_no_dense_weight(subject: LinearSubject) -> None:
    """It is no linear map, and whoever asks for its dense weight is given the reason."""
    for layer, weight, _ in layers(small(subject), torch.float64):
        assert why_not_dense(layer), "it says that no dense weight does, and not why"
        x = numbers(3, weight.shape[1], dtype=torch.float64)
        zero = layer(torch.zeros_like(x))
        gap = (layer(2 * x) - zero) - 2 * (layer(x) - zero)
        assert gap.norm() > 1e-6 * layer(x).norm(), "it is a linear map"
        said = ""
        try:
            full_weight(layer)
        except InputError as error:
            said = str(error)
        assert str(why_not_dense(layer)) in said, "asked for its dense weight it gives no reason"


@linears_check(needs=("has_no_dense_weight",))
def check_gradients_of_all_tensors(subject: LinearSubject) -> None:
    """In float64 inputs and trained tensors get the gradients that differences give."""
    for layer, weight, _ in layers(small(subject), torch.float64):
        x = numbers(3, weight.shape[1], dtype=torch.float64).requires_grad_()
        names, own = zip(*layer.named_parameters(), strict=True)

        def output(
            inputs: Tensor, *values: Tensor, layer: nn.Module = layer, names: Any = names
        ) -> Tensor:
            named = dict(zip(names, values, strict=True))
            found: Tensor = torch.func.functional_call(layer, named, (inputs,))
            return found

        assert torch.autograd.gradcheck(output, (x, *own), fast_mode=True)


@dense_check()
def check_written_is_made(subject: LinearSubject) -> None:
    """Writing a weight into a layer gives the bits of a layer that is made of it."""
    form = form_of_value(small(subject))
    if form.write is None:
        raise NotApplicable("the form cannot hold any weight")
    for layer, weight, arguments in layers(small(subject)):
        other = numbers(*weight.shape, name="another")
        write_weight(layer, other)
        made = form.from_dense(other.clone(), None, **arguments)
        assert torch.equal(full_weight(layer), full_weight(made)), "written, it is another"


@dense_check()
def check_takes_shifts_of_its_tiles(subject: LinearSubject) -> None:
    """A change that is one number in each tile is taken, to 1 %, and any other is not.

    `shift` itself writes nothing.
    """
    form = form_of_value(small(subject))
    if form.shift is None:
        raise NotApplicable("the form takes no change as it is")
    for layer, weight, _ in layers(small(subject)):
        assert isinstance(layer, FormLayer), "it takes changes, and is no FormLayer"
        assert layer.tile is not None, "it takes changes, and does not say of which tiles"
        rows, columns = layer.tile
        each = numbers(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), name="shift")
        change = each.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        change = change[: weight.shape[0], : weight.shape[1]]
        before = full_weight(layer).clone()
        shifted = form.shift(layer, change)
        assert shifted is not None, f"a change of tiles of {[rows, columns]} is refused"
        assert torch.equal(full_weight(layer), before), "`shift` has changed the layer"
        if rows * columns > 1:
            assert form.shift(layer, numbers(*weight.shape)) is None, "it takes any change"
        with torch.no_grad():
            for name, value in shifted.items():
                layer.get_parameter(name).copy_(value)
        assert_close(full_weight(layer), before + change, 1e-2, "shifted, it is another")


@dense_check()
def check_gradients_of_inputs(subject: LinearSubject) -> None:
    """In float64 inputs and bias get the gradients of the dense layer."""
    for layer, weight, _ in layers(small(subject), torch.float64):
        bias = layer._parameters["bias"]
        x = numbers(3, weight.shape[1], dtype=torch.float64).requires_grad_()
        out = numbers(3, weight.shape[0], name="out", dtype=torch.float64)
        wanted = [x] if bias is None else [x, bias]
        found = torch.autograd.grad(layer(x), wanted, out)
        dense = full_weight(layer).detach().double()
        assert_close(found[0], out @ dense, 1e-6, "the inputs' gradient")
        if bias is not None:
            assert_close(found[1], out.sum(0), 1e-9, "the bias's gradient")


@linears_check(unless=("has_no_dense_weight", "corrects_gradients"))
def check_gradients_of_the_weight(subject: LinearSubject) -> None:
    """In float64 its tensors get the gradients that they get through the dense weight, or none."""
    form = form_of_value(small(subject))
    for layer, weight, _ in layers(small(subject), torch.float64):
        own = {n: p for n, p in layer.named_parameters() if n != "bias"}
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        assert sorted(trained) == (sorted(own) if form.trains else []), f"{trained} take gradients"
        if not form.trains:
            continue
        x = numbers(3, weight.shape[1], dtype=torch.float64)
        out = numbers(3, weight.shape[0], name="out", dtype=torch.float64)
        found = torch.autograd.grad(layer(x), list(own.values()), out)
        dense = full_weight(layer)
        expected = torch.autograd.grad(dense, list(own.values()), out.T @ x)
        for name, one, other in zip(own, found, expected, strict=True):
            assert_close(one, other, 1e-9, f"the gradient of {name}")


@linears_check()
def check_low_precision(subject: LinearSubject) -> None:
    """In bf16 and under autocast outputs are bf16, and within 2 % of those in fp32."""
    for layer, weight, _ in layers(small(subject)):
        x = numbers(6, weight.shape[1])
        exact = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = layer(x)
        held = layer.bfloat16()(x.bfloat16())
        for name, found in (("autocast", cast), ("bf16", held)):
            assert found.dtype == torch.bfloat16, f"{name} gives {found.dtype}"
            gap = ((found.float() - exact).norm() / exact.norm()).item()
            assert gap < 0.02, f"{name}: outputs of {[*weight.shape]} are off by {gap:.2%}"


@linears_check()
def check_no_chance(subject: LinearSubject) -> None:
    """Two layers made of one weight are equal to the bit, and torch's generator is left alone."""
    state = torch.get_rng_state()
    pairs = zip(layers(small(subject)), layers(small(subject)), strict=True)
    for (one, _, _), (other, _, _) in pairs:
        assert_same(one.state_dict(), other.state_dict(), "two are different")
    assert torch.equal(torch.get_rng_state(), state), "making a layer draws from torch's generator"


@linears_check()
def check_drawn_anew(subject: LinearSubject) -> None:
    """New layers' weights are as large as dense ones on average, a function of seed and name.

    Those of a form that begins with the dense layer's own weight are what that becomes.
    """
    value = small(subject)
    form = form_of_value(value)
    arguments = value.arguments(192, 160)
    if form is DENSE or not form.trains or arguments is None:
        raise NotApplicable("its new layers are made of dense weights")

    def drawn(seed: int, name: str) -> FormLayer:
        layer: nn.Module = form.make(192, 160, False, **arguments)
        assert isinstance(layer, FormLayer)
        with torch.no_grad():
            layer.initialise(std=0.5, seed=seed, name=name)
        return layer

    begun = drawn(0, "a")
    if begun.begins_dense:
        weight = normal_(torch.empty(160, 192), seed=0, name="a.weight", std=0.5)
        made = form.from_dense(weight, None, **arguments)
        assert_same(begun.state_dict(), made.state_dict(), "it is not made of the dense weight")
    else:
        size = full_weight(begun).detach().square().mean().sqrt().item()
        assert 0.42 < size < 0.58, f"entries that should be 0.5 on average are {size:.3f}"
    own = begun.state_dict()
    assert_same(own, drawn(0, "a").state_dict(), "drawn twice, it is another")
    for seed, name in ((1, "a"), (0, "b")):
        other = drawn(seed, name).state_dict()
        assert not all(torch.equal(own[key], other[key]) for key in own), (
            "seed or name have no part in it"
        )
