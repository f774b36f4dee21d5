"""A policy over several updates: what it costs, and how it resumes."""

from __future__ import annotations

import json
import statistics

import torch

from modicum.core.errors import InputError
from modicum.memory.activations import Activations
from modicum.models.convnet import ConvNet
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.memory.subjects import (
    MemorySubject,
    batch,
    classifier,
    memory_check,
    small,
    train,
)

_STEPS = 8


@memory_check()
def check_resumes_to_the_bit(subject: MemorySubject) -> None:
    """Stopped after any update and loaded into new objects, losses are the same to the bit."""
    whole = train(*_begun(subject), range(_STEPS))
    model, optimizer, runtime = _begun(subject)
    train(model, optimizer, runtime, range(3))
    weights, moments = model.state_dict(), optimizer.state_dict()
    kept = json.loads(json.dumps(runtime.state_dict()))
    model, optimizer, runtime = _begun(subject)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    runtime.load_state_dict(kept)
    found = train(model, optimizer, runtime, range(3, _STEPS))
    assert found == whole[3:], f"the losses are {found} after resuming, and {whole[3:]} else"


@memory_check()
def check_evaluation_is_left_alone(subject: MemorySubject) -> None:
    """Without gradients the context does nothing."""
    model = classifier().eval()
    runtime = small(subject).attach(model)
    images, _ = batch()
    with torch.no_grad():
        expected = model(images)
        with runtime.context():
            assert torch.equal(model(images), expected), "the model computes something else"
    assert runtime.held_bytes == 0, f"it holds {runtime.held_bytes} bytes"


@memory_check()
def check_the_ledger_gives_the_range(subject: MemorySubject) -> None:
    """What is left of saved tensors lies within the range that the method's ledger says."""
    model = classifier()
    policy = small(subject)
    runtime = policy.attach(model)
    with runtime.context():
        loss = model(batch()[0]).sum()
    least, expected, most = policy.shares(4)
    found = runtime.measured
    assert found is not None, "nothing was measured"
    for name in ("values", "signs"):
        low, high, left = getattr(least, name), getattr(most, name), getattr(found, name)
        assert low <= getattr(expected, name) <= high, f"what is expected of {name} is no range"
        assert low - 1e-9 <= left <= high + 0.01, f"{left:.3f} of {name}, said {low} to {high}"
    del loss


@memory_check()
def check_a_model_without_convolutions(subject: MemorySubject) -> None:
    """A model that has nothing for it is refused in one sentence."""
    if "needs_convolutions" not in subject.info.traits:
        raise NotApplicable("it works on other layers too")
    refusal = ""
    try:
        small(subject).attach(torch.nn.Linear(2, 2))
    except InputError as error:
        refusal = str(error)
    assert refusal, "it was attached to a model that has nothing for it"
    assert "\n" not in refusal, "the refusal has several lines"


@memory_check(expensive=True, proves="alone")
def check_learns_as_without_it(subject: MemorySubject) -> None:
    """Over 60 updates the loss falls by as much as without it, to a tenth."""
    model, optimizer, runtime = _begun(subject)
    found = train(model, optimizer, runtime, range(60))
    model, optimizer, _ = _begun(subject)
    expected = []
    for step in range(60):
        images, labels = batch(step)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    ends = [statistics.mean(losses[-20:]) for losses in (found, expected)]
    assert ends[0] <= 1.1 * ends[1], f"the loss is {ends[0]:.3f} with it and {ends[1]:.3f} without"


def _begun(subject: MemorySubject) -> tuple[ConvNet, torch.optim.Optimizer, Activations]:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, small(subject).attach(model)
