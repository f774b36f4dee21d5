"""Adapters on convolutions: of methods that say that they can be there."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path

from torch import nn

from modicum.adapters.files import load
from modicum.core.contracts.catalog import of_value
from modicum.core.random import normal_
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    numbers,
    rewrites,
    start_tolerance,
    starts_and_learns,
)


@adapters_check(needs=("adapts_convolutions",), unless=("prepares_from_data",))
def check_on_convolutions(subject: AdapterSubject) -> None:
    """On convolutions it starts as the base, trains, merges to what it computes, and is saved.

    They are of one group and of two, with stride, padding and dilation, on odd sizes.
    """
    model, images = _convolutions(), numbers(2, 4, 9, 7)
    before = model(images)
    adapter = attached(subject, model, targets=("conv*",))
    adapted = starts_and_learns(subject, adapter, images, before)
    record = of_value(adapter.method)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        adapter.save(folder, form="modicum")
        load(other := _convolutions(), folder, plugins=() if record.module else (record.file,))
        assert_close(other(images), adapted, 1e-6, "loaded, it computes something else")
    if "mergeable" in subject.info.traits:
        adapter.merge()
        assert_close(model(images), adapted, 1e-5, "the merged model computes something else")
        adapter.unmerge()
        assert_close(model(images), adapted, 1e-5, "unmerged it computes something else")
    adapter.detach()
    tolerance = max(1e-5 if rewrites(subject) else 1e-6, start_tolerance(subject))
    assert_close(model(images), before, tolerance, "the detached model is not the base")


def _convolutions() -> nn.Module:
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(4, 6, 3, stride=(2, 1), padding=1),
            bend=nn.Tanh(),
            conv2=nn.Conv2d(6, 8, (3, 2), dilation=(1, 2), groups=2, bias=False),
        )
    )
    for name, parameter in model.named_parameters():
        normal_(parameter, std=0.3, seed=0, name=name)
    return model
