"""Compressed models are trained on: in plain loops, after an interruption, by other trainers."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.compress.subjects import (
    CompressSubject,
    compress_check,
    compressed,
    llama,
    next_token,
    shapes,
    small,
    tokens,
    wrapped,
)
from modicum.proofs.contracts.small_training import SmallTraining, assert_resumes
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers


@compress_check(proves="alone")
def check_recovers_in_a_plain_loop(subject: CompressSubject) -> None:
    """Fitted, then an optimizer of torch's: the loss falls by a fifth, and every factor moves."""
    handle, ids = compressed(small(subject)), tokens(8)
    before = {name: value.clone() for name, value in handle.state_dict().items()}
    optimizer = torch.optim.AdamW(handle.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = next_token(handle.model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], f"the loss goes from {losses[0]:.2f} to {losses[-1]:.2f}"
    after = handle.state_dict()
    stuck = [name for name in before if torch.equal(before[name], after[name])]
    assert not stuck, f"{stuck[0]} is stuck"


@compress_check()
def check_resumes_to_the_bit(subject: CompressSubject) -> None:
    """Stopped after two steps and continued in a wrapped model, training ends in the same bits."""
    if "exact_resume" not in subject.info.traits:
        raise NotApplicable("the method does not claim `exact_resume`")
    value, like = small(subject), compressed(small(subject))

    def again(saved: object) -> SmallTraining:
        model = wrapped(value, llama(initializer_range=0.1), like).model
        value.freeze(model)
        return SmallTraining(model, _loss)

    assert_resumes(lambda: SmallTraining(compressed(value).model, _loss), again)


@compress_check()
def check_frozen_layers_stay_frozen(subject: CompressSubject) -> None:
    """What becomes of a weight that takes no gradients takes none either."""
    model, full = llama(), shapes(llama())
    model.requires_grad_(False)
    compressed(small(subject), model)
    assert shapes(model) != full, "nothing has become smaller"
    assert not any(parameter.requires_grad for parameter in model.parameters())


@compress_check(expensive=True, proves="transformers")
def check_trains_under_transformers(subject: CompressSubject) -> None:
    """`transformers.Trainer` trains it; merged, a model is saved and read as ever."""
    model = hugging_face_llama(tie_word_embeddings=False)
    value = small(subject)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return next_token(lambda ids: model(ids).logits, ids)  # type: ignore[arg-type]

    handle = value.fit(model, value.calibrate(model, [tokens(4)], loss))
    before = {name: value.clone() for name, value in handle.state_dict().items()}
    assert before, "nothing has become smaller"
    train_under_transformers(model, tokens(8), max_steps=3, learning_rate=1e-2)
    after = handle.state_dict()
    stuck = [name for name in before if torch.equal(before[name], after[name])]
    assert not stuck, f"the trainer leaves {stuck[0]} as it was"
    beside = model(tokens()).logits
    handle.merge()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder)
    gap = (again(tokens()).logits - beside).abs().max().item()
    assert gap < 1e-4, f"the saved model's logits differ by {gap:.3g}"


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    return next_token(model, tokens(length=4 + step))
