"""Buffers that are drawn from a seed, of which states hold the seed alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.drawn_buffers import DrawnBuffers
from modicum.core.random import normal_


class Noise(DrawnBuffers):
    """A matrix, and its sum in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_drawn("matrix", torch.empty(3, 4))
        self.register_drawn("total", torch.empty(1))
        self.precise_names = ("total",)

    def drawn(self, seed: int) -> Mapping[str, Tensor]:
        matrix = normal_(torch.empty(3, 4), seed=seed, name="noise")
        return {"matrix": matrix, "total": matrix.sum().view(1)}


def noise(seed: int) -> Noise:
    module = Noise()
    module.draw(seed, "cpu")
    return module


def test_a_state_holds_the_seed_and_brings_what_was_drawn() -> None:
    one, other = nn.Sequential(noise(5)), nn.Sequential(noise(6))
    assert list(one.state_dict()) == ["0.seed"]
    assert not torch.equal(one[0].matrix, other[0].matrix)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(one[0].matrix, other[0].matrix)
    assert other[0].drawn_from == 5


def test_a_seed_that_was_written_in_place_is_drawn_from() -> None:
    module = noise(5)
    before = module.matrix
    module.redraw()
    assert module.matrix is before  # nothing has changed, and nothing was drawn
    module.seed.fill_(6)
    module.redraw()
    assert torch.equal(module.matrix, noise(6).matrix)


def test_it_is_cast_with_the_model_but_for_what_is_precise() -> None:
    module = noise(5)
    exact = module.matrix.clone(), module.total.clone()
    module.bfloat16()
    assert torch.equal(module.matrix, exact[0].bfloat16())
    assert torch.equal(module.total, exact[1])
    module.seed.fill_(6)
    module.redraw()
    assert (module.matrix.dtype, module.total.dtype) == (torch.bfloat16, torch.float32)
    assert module.to("meta").total.is_meta


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_that_no_file_holds_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match="64-bit"):
        noise(seed)


def test_a_state_draws_anew_what_a_cast_has_rounded_or_a_move_has_emptied() -> None:
    module, exact = noise(5), noise(5)
    state = copy.deepcopy(module.state_dict())
    module.bfloat16().float()
    assert not torch.equal(module.matrix, exact.matrix)
    module.load_state_dict(state)
    assert torch.equal(module.matrix, exact.matrix)
    module.to("meta").to_empty(device="cpu")
    module.matrix.fill_(7)
    module.load_state_dict(state)
    assert torch.equal(module.matrix, exact.matrix)
    assert torch.equal(module.total, exact.total)
    before = module.matrix
    module.to("cpu").load_state_dict(state)
    assert module.matrix is before  # nothing has changed, and nothing was drawn
