"""An optimizer's state where shapes change: what moves, what is lost, who owns it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from modicum.core.contracts.state import optimizer_view
from modicum.core.contracts.surgery import RowMap
from modicum.core.ranks.ranks import Ranks
from modicum.optim import AdamW8bit, GaLore, Muon
from modicum.trainer.held_optimizer import hand_over, moving

ROWS = (RowMap(0, (0, 2, 3)),)
COLUMNS = (RowMap(1, tuple(range(300))),)


def stepped(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> Any:
    """The optimizer's state by name, after a step."""
    for group in optimizer.param_groups:
        group["names"] = ["w"]
    weight.grad = torch.randn(weight.shape)
    optimizer.step()
    return optimizer_view(optimizer).read()


def test_rows_of_codes_move_with_their_scales_and_columns_do_not() -> None:
    weight = nn.Parameter(torch.randn(4, 512))
    optimizer = AdamW8bit([weight], smallest=1024)
    entries = stepped(optimizer, weight)
    rowed, lost = moving(optimizer, entries, {"w": ROWS}, {"w": (4, 512)})
    assert rowed == {"w/exp_avg_scale", "w/exp_avg_sq_scale"}
    assert lost == set()
    # A block of 256 columns has one scale, so that columns cannot go on their own.
    assert moving(optimizer, entries, {"w": COLUMNS}, {"w": (4, 512)}) == (set(), set(entries))


def test_what_becomes_too_small_for_codes_or_for_a_matrix_is_lost() -> None:
    weight = nn.Parameter(torch.randn(4, 512))
    optimizer: torch.optim.Optimizer = AdamW8bit([weight], smallest=2000)
    entries = stepped(optimizer, weight)
    assert moving(optimizer, entries, {"w": ROWS}, {"w": (4, 512)}) == (set(), set(entries))
    large = nn.Parameter(torch.randn(16, 512))
    optimizer = Muon([large], state_bits=8)
    entries = stepped(optimizer, large)
    assert entries["w/momentum_buffer"].dtype == torch.uint8
    assert moving(optimizer, entries, {"w": ROWS}, {"w": (16, 512)}) == (set(), set(entries))
    optimizer = Muon([weight])
    entries = stepped(optimizer, weight)
    assert moving(optimizer, entries, {"w": ROWS}, {"w": (4, 512)}) == (set(), set())


def test_moments_in_a_subspace_are_lost_and_others_stay() -> None:
    weight = nn.Parameter(torch.randn(16, 24))
    optimizer = GaLore([weight], rank=4)
    entries = stepped(optimizer, weight)
    assert moving(optimizer, entries, {"w": ROWS}, {"w": (16, 24)}) == (set(), set(entries))
    assert moving(optimizer, entries, {}, {"w": (16, 24)}) == (set(), set())


class Owning(torch.optim.SGD):
    """Of two matrices each rank owns one."""

    def __init__(self, owned: str) -> None:
        super().__init__([nn.Parameter(torch.ones(2, 3)) for _ in "ab"], 0.1)
        self.param_groups[0]["names"], self.owned = ["a", "b"], owned

    def keeps_whole(self, parameter: Tensor) -> bool:
        return True

    def holds(self, parameter: Tensor) -> bool:
        names = dict(zip("ab", self.param_groups[0]["params"], strict=True))
        return parameter is names[self.owned]


def handed(ranks: Ranks) -> dict[str, Any]:
    """What a rank holds after each has got the matrix that the other had."""
    had, has = "ab"[ranks.rank], "ba"[ranks.rank]
    momentum = torch.full((2, 3), 1.0 + ranks.rank, dtype=torch.bfloat16)
    held: dict[str, Any] = {f"{had}/momentum": momentum, f"{had}/step": torch.tensor(7.0)}
    hand_over(held, Owning(has), ranks)
    return {key: [str(v.dtype), v.tolist()] for key, v in held.items() if key.startswith(has)}


@pytest.mark.ranks
def test_what_an_owner_held_is_sent_to_the_new_one(pool: Pool) -> None:
    first, second = pool.run(handed, ranks=2)
    assert first == {
        "b/momentum": ["torch.bfloat16", [[2.0] * 3] * 2],
        "b/step": ["torch.float32", 7.0],
    }
    assert second["a/momentum"] == ["torch.bfloat16", [[1.0] * 3] * 2]
