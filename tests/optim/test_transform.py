"""Means over positions, a rank's rows of a gradient, and transforms in other people's loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.core.contracts.lightning_callback import LightningCalls
from modicum.core.errors import InputError
from modicum.optim import MKOR, SGD, Eva, TransformContext
from modicum.optim.capture import Capture, trained_layers
from modicum.optim.eva import EvaRuntime
from modicum.optim.layer_means import RunningMeans
from modicum.optim.layer_sums import Sums
from modicum.optim.transform import GradientRows
from modicum.proofs import run_battery


def sums_of(layer: nn.Module, inputs: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """[sum of inputs | positions | sum of output gradients] of one pass, in fp64."""
    weight = layer.weight
    sums = torch.zeros(weight[0].numel() + 1 + len(weight), dtype=torch.float64)
    capture = Capture([(layer, Sums(layer, sums, options.pop("samples", None)))])
    with capture.capturing(**options):
        (layer(inputs) * weights).sum().backward()
    capture.close()
    return sums


@given(
    leading=st.lists(st.integers(1, 4), max_size=3),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
    masked=st.booleans(),
)
def test_sums_of_a_linear_layer(
    leading: list[int], widths: tuple[int, int], seed: int, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(*widths).double()
    inputs = torch.randn(*leading, widths[0], generator=generator, dtype=torch.float64)
    weights = torch.randn(*leading, widths[1], generator=generator, dtype=torch.float64)
    mask = torch.rand(leading, generator=generator) < 0.6 if masked and leading else None
    counted = torch.ones(leading, dtype=torch.bool) if mask is None else mask
    found = sums_of(layer, inputs, weights, mask=mask)
    x, count, g = found.split([widths[0], 1, widths[1]])
    torch.testing.assert_close(x, inputs[counted].sum(0))
    torch.testing.assert_close(g, weights[counted].sum(0))
    assert count == counted.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": (2, 1)},
        {"padding": "same"},
        {"padding": 1, "padding_mode": "circular"},
        {"bias": False, "padding": "valid"},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_sums_of_a_convolution_are_those_of_a_linear_layer_over_patches(
    options: dict[str, Any], masked: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, (2, 3), **options).double()
    inputs = torch.randn(5, 3, 7, 8, dtype=torch.float64)
    weights = torch.randn_like(layer(inputs))
    mask = torch.tensor([True, False, True, True, False]) if masked else None
    kept = slice(None) if mask is None else mask
    found = sums_of(layer, inputs, weights, mask=mask)
    x, count, g = found.split([18, 1, 4])
    places = weights.shape[2] * weights.shape[3]
    assert count == (3 if masked else 5) * places
    torch.testing.assert_close(g, weights[kept].sum((0, 2, 3)))
    # With a gradient that is the same everywhere, the weight's is that times the sum of patches.
    everywhere = torch.ones(4, dtype=torch.float64)[:, None, None].expand_as(weights[0])
    (gradient,) = torch.autograd.grad((layer(inputs[kept]) * everywhere).sum(), layer.weight)
    torch.testing.assert_close(gradient[0].flatten(), x)


def test_a_convolution_of_one_image_and_channels_last() -> None:
    layer = nn.Conv2d(2, 3, 2).double()
    inputs = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    weights = torch.randn(1, 3, 3, 3, dtype=torch.float64)
    expected = sums_of(layer, inputs, weights)
    torch.testing.assert_close(sums_of(layer, inputs[0], weights[0]), expected)
    last = inputs.to(memory_format=torch.channels_last)
    torch.testing.assert_close(sums_of(layer, last, weights), expected)


def test_samples_are_spread_over_the_batch() -> None:
    layer = nn.Linear(2, 1).double()
    inputs = torch.arange(20, dtype=torch.float64).view(10, 2)
    weights = torch.arange(10, dtype=torch.float64).view(10, 1)
    x, y, count, g = sums_of(layer, inputs, weights, samples=4)  # each third: 0, 3, 6, 9
    assert (x, y, count, g) == (0 + 6 + 12 + 18, 4 + 36, 4, 18)
    mask = torch.arange(10) > 0
    assert sums_of(layer, inputs, weights, samples=4, mask=mask)[2] == 3
    assert sums_of(layer, inputs, weights, samples=10)[2] == 10
    assert sums_of(layer, inputs[:3], weights[:3], samples=4)[2] == 3


def test_padding_that_is_no_number_is_not_counted() -> None:
    layer = nn.Linear(2, 2).double()
    inputs = torch.ones(2, 3, 2, dtype=torch.float64)
    inputs[1, 2] = torch.nan
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    sums = torch.zeros(5, dtype=torch.float64)
    remembered = Sums(layer, sums).on_input(inputs, mask)
    assert remembered.total.tolist() == [5.0, 5.0]
    assert remembered.count == 5


def test_a_mask_may_be_shorter_or_flat_and_else_must_fit() -> None:
    layer = nn.Linear(2, 2)
    inputs, sums = torch.ones(3, 4, 2), torch.zeros(5)
    one = Sums(layer, sums)
    assert one.on_input(inputs, torch.tensor([True, True, False])).count == 8
    assert one.on_input(inputs.flatten(0, 1), torch.ones(3, 4).tril()).count == 6
    with pytest.raises(InputError, match=r"leading dimensions \(3, 4\)") as caught:
        one.on_input(inputs, torch.ones(4, 2))
    assert caught.value.field == "mask"


def test_sums_are_fp32_under_bf16() -> None:
    layer = nn.Linear(1, 1)
    sums = torch.zeros(3)
    Capture([(layer, Sums(layer, sums))])
    tenth = torch.full((1000, 1), 0.1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (layer(tenth) * tenth).float().sum()
    loss.backward()
    # bf16's 0.1 is 0.10009765625; its numbers near the sum are half a unit apart.
    assert sums.tolist() == pytest.approx([100.09765625, 1000, 100.09765625], rel=1e-6)


def means(**options: Any) -> tuple[RunningMeans, nn.Sequential]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    layers = trained_layers(model)
    return RunningMeans(layers, True, torch.float32, torch.device("cpu"), **options), model


def test_the_new_mean_weighs_the_decay_and_the_first_is_taken_as_it_is() -> None:
    running, _ = means()
    first, second = running.split(running.sums)
    assert running.averages.numel() == (2 + 1 + 3) + (3 + 1 + 1)
    first += torch.tensor([2.0, 4, 2, 1, 1, 1])  # two positions
    running.average(0.75, gradient_scale=4.0)
    assert running.seen.tolist() == [True, False]
    (a, g), (b, h) = running.vectors
    assert (a.tolist(), g.tolist()) == ([1, 2, 1], [2, 2, 2])
    assert (b.tolist(), h.tolist()) == ([0, 0, 0], [0])
    running.sums.zero_()
    first += torch.tensor([5.0, 6, 1, 0, 0, 0])
    second += torch.tensor([3.0, 6, 9, 3, 6])
    running.average(0.75)
    assert running.seen.tolist() == [True, True]
    assert a.tolist() == [0.25 * 1 + 0.75 * 5, 0.25 * 2 + 0.75 * 6, 1]
    assert g.tolist() == [0.5, 0.5, 0.5]
    assert (b.tolist(), h.tolist()) == ([1, 2, 3], [2])


def test_averages_stay_where_a_layer_is_not_used_or_a_mean_is_no_number() -> None:
    running, _ = means()
    running.sums.fill_(1.0)
    running.average(0.5)
    running.sums.zero_()
    running.average(0.5)
    assert running.averages.tolist() == [1.0] * 11
    running.sums.fill_(2.0)
    running.sums[3] = torch.inf
    running.average(0.5)
    assert running.averages.tolist() == [1.0] * 11


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [
        (torch.float32, torch.contiguous_format),
        (torch.bfloat16, torch.contiguous_format),
        (torch.float32, torch.channels_last),
    ],
)
def test_rows_are_changed_where_the_gradient_is(
    bias: bool, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2, bias=bias)).to(dtype, memory_format=memory_format)
    eva = Eva(kl_clip=None).bind(TransformContext(model))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    assert model[0].weight.grad.is_contiguous(memory_format=memory_format)
    before = [p.grad.float().flatten(1) if p.ndim > 1 else p.grad.float()[:, None]
              for p in model.parameters()]  # fmt: skip
    G = torch.cat(before, 1)
    (layer,) = eva.layers
    rows = eva.rows(layer)
    assert isinstance(rows, GradientRows)
    a, left = torch.randn(8 + bias), torch.randn(4)
    torch.testing.assert_close(rows.times(a), G @ a)
    torch.testing.assert_close(rows.square(), G.square().sum())
    rows.subtract(torch.tensor(0.5), left, a)
    expected = 0.5 * G - torch.outer(left, a)
    after = [p.grad.float().flatten(1) if p.ndim > 1 else p.grad.float()[:, None]
             for p in model.parameters()]  # fmt: skip
    torch.testing.assert_close(torch.cat(after, 1), expected.to(dtype).float())


def test_models_without_a_trained_layer_are_refused() -> None:
    with pytest.raises(InputError, match="adapters freeze them"):
        Eva(kl_clip=None).bind(TransformContext(nn.LayerNorm(3)))


def test_the_kl_clip_needs_an_optimizer() -> None:
    with pytest.raises(InputError, match="give the context the optimizer") as caught:
        Eva().bind(TransformContext(nn.Linear(2, 2)))
    assert caught.value.field == "kl_clip"
    Eva(kl_clip=0.0).bind(TransformContext(nn.Linear(2, 2)))


class Idle(Eva):
    """A transform that does nothing, keeps no state, and leaves its hooks."""

    def bind(self, context: TransformContext) -> Any:
        return IdleRuntime(self, context)


class IdleRuntime(EvaRuntime):
    def apply(self, loss_scale: float = 1.0, loss: float | None = None) -> None:
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.updates = 0


class Eager(Eva):
    """One that counts every forward pass, with all its positions."""

    def bind(self, context: TransformContext) -> Any:
        runtime = super().bind(context)

        def seen(sums: Sums, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            with torch.no_grad():
                total = sums.on_input(inputs[0], None)
                sums.on_output_gradient(torch.ones_like(output), total)

        for module, sums in runtime.means.accumulators():
            module.register_forward_hook(partial(seen, sums))
        return runtime


@pytest.mark.expensive
def test_the_battery_finds_broken_transforms() -> None:
    def wanting(method: Any) -> set[str]:
        results = run_battery(method, cheap_only=True)
        return {result.name for result in results if not result.passed}

    assert wanting(Eva()) == set()
    assert wanting(Idle) == {
        "only_its_layers_change",
        "missing_gradients",
        "resumes_to_the_bit",
        "bytes_of_the_state",
        "closing",
    }
    assert wanting(Eager) >= {
        "recomputation_changes_nothing",
        "other_passes_are_not_counted",
        "padding_does_not_count",
        "closing",
    }


def trainer_run(tmp_path: Path, transform: Any, **arguments: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(29, (16, 8), generator=torch.Generator().manual_seed(0))
    given = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **arguments,
    )
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    trainer = transformers.Trainer(
        model,
        given,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        optimizers=(optimizer, None),
        callbacks=[transform.callback()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return model


@pytest.mark.expensive
def test_under_transformers_it_does_what_it_does_in_a_loop(tmp_path: Path) -> None:
    trained = trainer_run(tmp_path, Eva())
    accumulated = trainer_run(
        tmp_path, Eva(), gradient_accumulation_steps=2, gradient_checkpointing=True
    )
    assert all(torch.isfinite(p).all() for p in accumulated.parameters())
    # The hooks are gone.
    assert not any(m._forward_hooks for m in trained.modules() if isinstance(m, nn.Linear))
    loop = by_hand(tmp_path)
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter, loop[name], rtol=1e-5, atol=1e-6)


def by_hand(tmp_path: Path) -> dict[str, Tensor]:
    """The same three updates without a trainer, of the batches that its sampler draws."""
    seen: list[Tensor] = []
    model = trainer_run(tmp_path, Seen(seen))
    torch.manual_seed(0)
    model = type(model)(model.config)
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    eva = Eva().bind(TransformContext(model, optimizer=optimizer))
    for ids in seen:
        logits = model(ids).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        eva.apply()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


class Seen:
    """In a transform's place: a callback that notes which token ids each step is given."""

    def __init__(self, seen: list[Tensor]) -> None:
        self.seen = seen

    def callback(self) -> Any:
        from transformers import TrainerCallback

        seen = self.seen

        class Callback(TrainerCallback):
            def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
                model.model.embed_tokens.register_forward_hook(
                    lambda module, inputs, output: seen.append(inputs[0].clone())
                )

        return Callback()


@pytest.mark.parametrize("value", [Eva(), MKOR()], ids=str)
def test_where_a_trainer_scales_losses_transforms_are_refused(value: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    optimizers = [SGD(model.parameters(), lr=0.1)]
    trainer = SimpleNamespace(optimizers=optimizers, global_step=0, scaler=object())
    with pytest.raises(InputError, match=r"with fp16 losses are multiplied.*train with bf16"):
        LightningCalls(value._begun).on_train_start(trainer, model)
    assert not any(layer._forward_hooks for layer in model)
