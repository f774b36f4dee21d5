"""What must hold of every gradient transform, before whatever optimizer it stands."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modicum.core.contracts.parameters import trained_shapes
from modicum.core.machine.memory import tensor_bytes
from modicum.core.torch_private import storage_address
from modicum.models.llama import Llama
from modicum.optim.sgd import SGD
from modicum.optim.transform import (
    GradientTransform,
    TransformContext,
    TransformQuery,
    TransformRuntime,
)
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.base import NotApplicable, check
from modicum.proofs.contracts.optim.subjects import llama, numbers, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers

TransformSubject = type[GradientTransform] | GradientTransform

transforms_check = partial(check, "optim", slot="transform", needs=("transforms_gradients",))
INNER = ".layers."  # in the names of the decoder's layers that transforms work on


class TransformedTraining:
    """A decoder, the transform, momentum, and what a checkpoint holds of the three."""

    def __init__(
        self, subject: TransformSubject, model: Llama | None = None, **fields: Any
    ) -> None:
        value = subject if isinstance(subject, GradientTransform) else subject.tiny()
        self.value = type(value)(**(value.model_dump() | fields))
        self.model = llama() if model is None else model
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        context = TransformContext(self.model, optimizer=self.optimizer)
        self.runtime: TransformRuntime = self.value.bind(context)

    def backward(self, *, step: int = 0, cuts: int = 4, padding: int = 0) -> float:
        """The gradients of an update, in micro-batches of `cuts` rows; its loss."""
        ids, total = tokens(seed=step), 0.0
        for part in ids.split(cuts):
            shown = F.pad(part, (0, padding), value=1)
            mask = torch.arange(shown.shape[1] - 1).expand(len(part), -1) < part.shape[1] - 1
            with self.runtime.capturing(mask=mask if padding else None):
                logits = self.model(shown[:, :-1])[mask].float()
                summed = F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
                loss = summed / ids[:, 1:].numel()
                loss.backward()
            total += loss.item()
        return total

    def steps(self, first: int, last: int) -> list[float]:
        """Train from one step to another; the losses."""
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step=step))
            self.runtime.apply()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """A copy of every gradient."""
        named = self.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the transform's state."""
        state = self.runtime.state_dict()
        return {name: v for name, v in state.items() if isinstance(v, Tensor)}

    @property
    def rounding(self) -> float:
        """By how much of the largest element sums in another order may change an outcome."""
        return max([1e-4, *(2 * torch.finfo(v.dtype).eps for v in self.tensors().values())])

    def outcome(self) -> dict[str, Tensor]:
        """Gradients after `apply`, and the state's tensors."""
        self.runtime.apply()
        return self.gradients() | {f"state {k}": v.clone() for k, v in self.tensors().items()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor], what: str, tolerance: float) -> None:
    assert one.keys() == other.keys(), f"{what}: other tensors are there"
    for name, value in one.items():
        scale = max(float(value.abs().max()), 1e-12)
        found = float((value - other[name]).abs().max()) / scale
        assert found <= tolerance, f"{what}: {name} differs by {found:.3g} of its largest"


@transforms_check(proves="alone")
def check_learns_in_a_plain_loop(subject: TransformSubject) -> None:
    """Bound in one line and applied in another, before momentum, it brings the loss down."""
    training = TransformedTraining(subject)
    losses = []
    for _ in range(15):
        losses += training.steps(0, 1)
    assert losses[-1] < losses[0], f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}"


@transforms_check()
def check_only_its_layers_change(subject: TransformSubject) -> None:
    """Gradients of embeddings, norms, head and excluded layers stay as they are, to the bit."""
    training = TransformedTraining(subject, exclude=("o_proj",))
    training.backward()
    before = training.gradients()
    training.runtime.apply()
    for name, gradient in training.gradients().items():
        stays = name.endswith("norm.weight") or INNER not in name or "o_proj" in name
        kept = torch.equal(gradient, before[name])
        assert kept == stays, f"the gradient of {name} {'stays' if kept else 'changes'}"


@transforms_check()
def check_micro_batches_are_one_batch(subject: TransformSubject) -> None:
    """An update in micro-batches of unequal size is that of the full batch, to 1e-4.

    Where state is kept in 16 bits, to what rounding it to these may change.
    """
    whole, cut = TransformedTraining(subject), TransformedTraining(subject)
    whole.backward()
    cut.backward(cuts=3)
    _same(whole.outcome(), cut.outcome(), "in micro-batches", whole.rounding)


@transforms_check()
def check_recomputation_changes_nothing(subject: TransformSubject) -> None:
    """Blocks that run forward twice are counted once."""
    plain, twice = TransformedTraining(subject), TransformedTraining(subject)
    twice.model.recompute = True
    plain.backward()
    twice.backward()
    _same(plain.outcome(), twice.outcome(), "with recomputation", 1e-5)


@transforms_check()
def check_other_passes_are_not_counted(subject: TransformSubject) -> None:
    """Evaluation, forward passes without a backward one, and rehearsals leave no trace."""
    plain, noisy = TransformedTraining(subject), TransformedTraining(subject)
    other = tokens(seed=9)
    with torch.no_grad():
        noisy.model(other)
    noisy.model(other)
    with noisy.runtime.capturing(False):
        noisy.model(other).sum().backward()
    noisy.model.zero_grad()
    plain.backward()
    noisy.backward()
    _same(plain.outcome(), noisy.outcome(), "after other passes", 0.0)


@transforms_check()
def check_padding_does_not_count(subject: TransformSubject) -> None:
    """Positions that the mask leaves out change nothing, to 1e-4.

    Where state is kept in 16 bits, to what rounding it to these may change.
    """
    plain, padded = TransformedTraining(subject), TransformedTraining(subject)
    plain.backward()
    padded.backward(padding=5)
    _same(plain.outcome(), padded.outcome(), "with padding", plain.rounding)


@transforms_check()
def check_low_precision(subject: TransformSubject) -> None:
    """bf16 gradients stay bf16, and are finite; the state's dtypes are those of fp32 weights."""
    training = TransformedTraining(subject, llama(torch.bfloat16))
    usual = {name: value.dtype for name, value in TransformedTraining(subject).tensors().items()}
    training.steps(0, 3)
    training.backward()
    training.runtime.apply()
    for name, gradient in training.gradients().items():
        assert gradient.dtype == torch.bfloat16, f"the gradient of {name} is {gradient.dtype}"
        assert gradient.isfinite().all(), f"the gradient of {name} is no number"
    for name, value in training.tensors().items():
        assert value.dtype == usual[name], f"{name} is {value.dtype}"


@transforms_check()
def check_missing_gradients(subject: TransformSubject) -> None:
    """Where a layer has no gradient it gets none, and the others are transformed."""
    training = TransformedTraining(subject)
    training.backward()
    before = training.gradients()
    absent = training.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    absent.grad = None
    training.runtime.apply()
    assert absent.grad is None, "a gradient appears"
    name = "model.layers.0.mlp.down_proj.weight"
    after = training.gradients()[name]
    assert not torch.equal(after, before[name]), f"the gradient of {name} stays"
    assert after.isfinite().all(), f"the gradient of {name} is no number"


@transforms_check()
def check_what_is_no_number_does_not_stay(subject: TransformSubject) -> None:
    """After an update whose loss is infinite, the state and the next gradients are finite."""
    training = TransformedTraining(subject)
    training.steps(0, 1)
    (training.model(tokens()) * torch.inf).sum().backward()
    training.runtime.apply()
    training.optimizer.zero_grad()
    training.backward()
    for name, value in training.outcome().items():
        assert value.isfinite().all(), f"{name} is no number after an infinite loss"


@transforms_check()
def check_resumes_to_the_bit(subject: TransformSubject) -> None:
    """Stopped after two updates and continued in a new model, it ends in the same bits."""
    if "exact_resume" not in subject.info.traits:
        raise NotApplicable("the method does not claim `exact_resume`")
    whole, begun, resumed = (TransformedTraining(subject) for _ in range(3))
    whole.steps(0, 4)
    begun.steps(0, 2)
    resumed.model.load_state_dict(begun.model.state_dict())
    resumed.optimizer.load_state_dict(begun.optimizer.state_dict())
    state = begun.runtime.state_dict()
    resumed.runtime.load_state_dict(
        {k: v.clone() if isinstance(v, Tensor) else json.loads(json.dumps(v)) for k, v in
         state.items()}
    )  # fmt: skip
    resumed.steps(2, 4)
    _same(dict(whole.model.named_parameters()), dict(resumed.model.named_parameters()),
          "after the interruption", 0.0)  # fmt: skip
    _same(whole.tensors(), resumed.tensors(), "after the interruption", 0.0)


@transforms_check()
def check_bytes_of_the_state(subject: TransformSubject) -> None:
    """The ledger's persistent bytes are those of the state, exactly."""
    training = TransformedTraining(subject)
    training.steps(0, 1)
    at = TransformQuery(trained_shapes(training.model))
    said, found = training.value.ledger(at).bytes("optimizer"), training.tensors().values()
    held = tensor_bytes(list({storage_address(tensor): tensor for tensor in found}.values()))
    assert said == held, f"the ledger says {said} bytes of state, there are {held}"


@transforms_check()
def check_work_and_activations(subject: TransformSubject) -> None:
    """Forward and backward save the same activations and do the same matrix products.

    Those of `apply` are no more than the ledger says.
    """
    plain, watched = llama(), TransformedTraining(subject)
    found = [_spent(model) for model in (plain, watched.model)]
    assert found[0] == found[1], f"(bytes saved, operations) are {found[1]}, without it {found[0]}"
    with FlopCounterMode(display=False) as counter:
        watched.runtime.apply()
    said = watched.value.ledger(TransformQuery(trained_shapes(plain))).flops("step")
    counted = counter.get_total_flops()
    assert counted <= said, f"the ledger says {said} operations a step, PyTorch counts {counted}"


@transforms_check()
def check_closing(subject: TransformSubject) -> None:
    """After `close` the model is as it was: no hook is left."""
    training = TransformedTraining(subject)
    training.runtime.close()
    left = [
        name
        for name, module in training.model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]
    assert not left, f"{left[0]} has hooks still"


@transforms_check(expensive=True, proves="transformers")
def check_trains_under_transformers(subject: TransformSubject) -> None:
    """A callback of `transformers.Trainer`, it changes what its layers learn, and nothing else."""
    value = subject if isinstance(subject, GradientTransform) else subject.tiny()
    plain, trained = _under_transformers(None), _under_transformers(value)
    for name, parameter in trained.named_parameters():
        assert parameter.isfinite().all(), f"{name} is no number"
    changed = [
        name
        for (name, one), other in zip(trained.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert changed, "the callback changes nothing"
    assert all(INNER in name for name in changed), f"{changed[0]} is no layer of the transform's"


def _spent(model: Llama) -> tuple[int, int]:
    """Bytes that autograd saves, weights excluded, and operations of matrix products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with saved_bytes(model.parameters()) as saved:
            loss = (model(tokens()) * numbers(29)).sum()
        loss.backward()
    return saved.total, counter.get_total_flops()


def _under_transformers(transform: GradientTransform | None) -> nn.Module:
    """A Hugging Face model after one update of plain SGD."""
    model: nn.Module = hugging_face_llama()
    train_under_transformers(
        model,
        tokens(8),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        callback=transform and transform.callback(),
        max_steps=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
    )
    return model
