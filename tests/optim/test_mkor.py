"""MKOR: which vectors enter, what comes out of them, its stabilizer, and its end."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.optim import MKOR, SGD, TransformContext
from modicum.optim.mkor import MKORRuntime


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    layers = [convolution, nn.ReLU(), nn.Flatten(), nn.Linear(12, 5, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 4)).to(dtype)


def images(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1 + torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64)


def bound(model: nn.Module, **fields: Any) -> MKORRuntime:
    return MKOR(**fields).bind(TransformContext(model))


def gradients(runtime: MKORRuntime) -> list[Tensor]:
    """Each layer's gradient [out, in], with a bias [out, in + 1]."""
    found = []
    for layer in runtime.layers:
        parts = [runtime.parameters[name].grad for name in (layer.weight, layer.bias) if name]
        found.append(torch.cat([part.reshape(layer.out_features, -1) for part in parts], 1))
    return found


def test_a_is_the_mean_and_g_the_sum_and_the_inverses_multiply_with_the_norm_kept() -> None:
    model, inputs = network(), images()
    runtime = bound(model, factors="full", clamp=1e9)
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.__setitem__(module, (given[0], gradient)))

    for module in model:
        module.register_forward_hook(note)
    model(inputs).square().mean(1).sum().div(len(inputs)).backward()
    before = gradients(runtime)
    runtime.apply()
    convolution, first, second = model[0], model[3], model[5]
    patches = nn.functional.unfold(inputs, 3, stride=2, padding=1).mean((0, 2))
    of_places = seen[convolution][1].mean((2, 3)).sum(0)  # over places a mean, over samples a sum
    one = torch.ones(1, dtype=torch.float64)
    expected = [(torch.cat([patches, one]), of_places)]
    for layer in (first, second):
        a, g = seen[layer][0].mean(0), seen[layer][1].sum(0)
        expected.append((a if layer is first else torch.cat([a, one]), g))
    for place, ((a, g), G, P) in enumerate(zip(expected, before, gradients(runtime), strict=True)):
        left, right = (
            torch.linalg.inv(torch.eye(len(v), dtype=torch.float64) + torch.outer(v, v))
            for v in (g, a)
        )
        for held, dense in zip(runtime.factors.pairs[place], (left, right), strict=True):
            torch.testing.assert_close(held, dense, rtol=0, atol=1e-9)
        product = left @ G @ right
        torch.testing.assert_close(P, product * G.norm() / product.norm(), rtol=1e-9, atol=1e-12)
        assert float(P.norm()) == pytest.approx(float(G.norm()), rel=1e-12)
        assert (P - G).abs().max() > 1e-3 * G.abs().max()


def test_factors_that_are_the_identity_leave_gradients_to_the_bit() -> None:
    model = network(torch.float32)
    runtime = bound(model, stabilizer="as_published")  # which takes nothing up at first
    model(images().float()).square().sum().backward()
    before = gradients(runtime)
    runtime.apply()
    assert all(torch.equal(G, P) for G, P in zip(before, gradients(runtime), strict=True))


def test_gradients_of_zero_and_what_is_no_number_stay() -> None:
    model = network()
    runtime = bound(model)
    (0 * model(images())).sum().backward()
    runtime.apply()
    assert not any(P.any() for P in gradients(runtime))
    held = {name: v.clone() for name, v in runtime.factors.state_dict().items()}
    model(images()).sum().backward()
    model[3].weight.grad[0, 0] = torch.nan
    runtime.apply(loss=1.0)
    assert all(torch.equal(v, held[name]) for name, v in runtime.factors.state_dict().items())


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_an_update_that_will_be_skipped_changes_no_factor(bad: str) -> None:
    """Where what is no number is in something that no layer shows."""
    model = network()
    model.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    runtime = bound(model, every=1)
    (model.scale * model(images()).square().sum()).backward()
    runtime.apply(loss=1.0)
    held = {name: v.clone() for name, v in runtime.factors.state_dict().items()}
    (model.scale * model(images(2)).square().sum()).backward()
    if bad == "gradient":
        model.scale.grad.fill_(torch.inf)
    runtime.apply(loss=float("nan") if bad == "loss" else 1.0)
    assert all(torch.equal(v, held[name]) for name, v in runtime.factors.state_dict().items())
    model.scale.grad.fill_(1.0)
    model(images(3)).square().sum().backward()
    runtime.apply(loss=1.0)
    assert not all(torch.equal(v, held[name]) for name, v in runtime.factors.state_dict().items())


def test_what_passes_added_up_that_led_to_no_update_is_forgotten() -> None:
    model = network()
    runtime = bound(model)
    model(images()).square().sum().backward()
    assert runtime.vectors.sums.any()
    runtime.before_update(1)
    assert not runtime.vectors.sums.any()
    runtime.end("there is nothing left to forget")
    runtime.before_update(2)


def test_refreshes_are_in_the_warm_up_and_every_fourth_update() -> None:
    model = nn.Linear(3, 2).double()
    runtime, changed = bound(model, every=4, warm_up=2, factors="full"), []
    for step in range(9):
        before = runtime.factors.pairs[0][1].clone()
        model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).square().sum().backward()
        runtime.apply()
        changed.append(not torch.equal(runtime.factors.pairs[0][1], before))
    assert changed == [True, True, False, False, True, False, False, False, True]


def test_the_published_stabilizer_makes_both_factors_the_identity() -> None:
    """And takes nothing up then; ours brings the one near it that is over the bound."""
    found = {}
    for stabilizer in ("each", "as_published"):
        model = nn.Linear(3, 2).double()
        runtime = bound(model, every=1, factors="full", stabilizer=stabilizer, keep=0.5)
        model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        runtime.apply()
        runtime.factors.pairs[0][0].mul_(8.0)
        right = runtime.factors.pairs[0][1].clone()
        model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        runtime.apply()
        found[stabilizer] = (*runtime.factors.pairs[0], right)
    left, right, _ = found["as_published"]
    assert torch.equal(left, torch.eye(2, dtype=torch.float64))
    assert torch.equal(right, torch.eye(4, dtype=torch.float64))
    left, right, before = found["each"]
    assert not torch.equal(left, torch.eye(2, dtype=torch.float64))
    a = torch.ones(4, dtype=torch.float64)
    near = torch.linalg.inv(0.95 * before + 0.05 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(right, torch.linalg.inv(near + torch.outer(a, a)))


class Ending:
    """A network under MKOR-H whose losses are given, so that its end comes when we say."""

    def __init__(self, **fields: Any) -> None:
        self.model = network(torch.float32)
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        value = MKOR(every=2, hybrid=True, hybrid_window=2, hybrid_after=3, **fields)
        self.runtime = value.bind(TransformContext(self.model, optimizer=self.optimizer))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.model(images(step).float()).square().sum().backward()
            self.runtime.apply(loss=8.0 if step == 0 else max(8.0 - 2 * step, 2.0))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


END = 19  # the number of updates before the one that ends it, by the losses above


def test_after_the_end_the_optimizer_is_alone_and_memory_is_back() -> None:
    training = Ending()
    training.steps(0, END)
    assert training.runtime.ended_because is None
    factor = weakref.ref(training.runtime.factors.pairs[0][0])
    sums = weakref.ref(training.runtime.vectors.sums)
    plain = Ending()
    plain.model.load_state_dict(training.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    plain.runtime.end("never begun")
    for each in (training, plain):
        each.steps(END, END + 5)
    assert "less than 0.1 times as fast" in str(training.runtime.ended_because)
    assert training.runtime.updates == END
    for one, other in zip(training.weights(), plain.weights(), strict=True):
        assert torch.equal(one, other)
    gc.collect()
    assert factor() is None
    assert sums() is None
    assert not any(module._forward_hooks for module in training.model.modules())
    assert training.runtime.state_dict() == {
        "updates": END,
        "ended": training.runtime.ended_because,
    }


@pytest.mark.parametrize("stopped", [END - 4, END + 2], ids=["before the end", "after it"])
@pytest.mark.parametrize("lived", [0, END + 3], ids=["new", "ended"])
def test_a_run_resumes_on_either_side_of_the_end(stopped: int, lived: int) -> None:
    """In a new process, or in one that has gone beyond the end since."""
    straight, begun, resumed = Ending(), Ending(), Ending()
    straight.steps(0, END + 6)
    begun.steps(0, stopped)
    resumed.steps(0, lived)
    state = begun.runtime.state_dict()
    resumed.runtime.load_state_dict(
        {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
    )
    resumed.model.load_state_dict(begun.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(begun.optimizer.state_dict()))
    resumed.steps(stopped, END + 6)
    assert straight.runtime.ended_because is not None
    assert straight.runtime.state_dict() == resumed.runtime.state_dict()
    for one, other in zip(straight.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other)


def test_without_losses_it_cannot_end_and_says_so() -> None:
    model = network()
    runtime = bound(model, hybrid=True)
    model(images()).sum().backward()
    with pytest.raises(InputError, match=r"^hybrid: .*apply\(loss=\.\.\.\)"):
        runtime.apply()
    calls = MKOR(hybrid=True).callback()
    with pytest.raises(InputError, match=r"^hybrid: .*train with modicum's trainer"):
        calls.on_train_begin(None, None, None, model=model, optimizer=None)


def test_the_state_of_other_layers_is_refused() -> None:
    runtime = bound(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False)))
    state = runtime.state_dict()
    assert {name: v.shape for name, v in state.items() if isinstance(v, Tensor)} == {
        "0.weight.output_inverse": (2, 2),
        "0.weight.input_inverse": (4, 4),
        "1.weight.output_inverse": (4, 4),
        "1.weight.input_inverse": (2, 2),
    }
    with pytest.raises(InputError, match=r"factors of other layers.*1\.weight"):
        runtime.load_state_dict({n: v for n, v in state.items() if not n.startswith("1.")})
    with pytest.raises(InputError, match=r"has shape \(5, 5\), this model's \(4, 4\)"):
        runtime.load_state_dict(state | {"0.weight.input_inverse": torch.zeros(5, 5)})
