"""Files of ranks next to weights: other numbers of ranks keep the mean of what is owed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.comm import PowerSGD
from modicum.comm.low_rank_exchange import LowRankExchange
from modicum.core.errors import InputError
from modicum.core.ranks import exchange_file
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.exchange_file import load_exchange, save_exchange, saved_exchanges
from modicum.core.ranks.ranks import Ranks

STEP = 7


class Alike(Ranks):
    """A rank among others that all say what it does."""

    def gather(self, value: Any) -> list[Any]:
        """As many times what this one says."""
        return [value] * self.size


def model_of(seed: int) -> nn.Module:
    model = nn.Linear(12, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    return model


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bound(rank: int, size: int, means: bool = True) -> LowRankExchange:
    exchange = PowerSGD(rank=2).bind(ExchangeContext(Alike(rank, size)))
    exchange.means = means  # as DDP's hook says of itself
    return exchange


def save(folder: Path, model: nn.Module, size: int, which: Sequence[int] | None = None) -> Tensor:
    """The files of so many ranks, or some of them; the mean of what all these owe."""
    owed = [drawn(10, 12, seed=100 * size + rank) for rank in range(size)]
    for rank in range(size) if which is None else which:
        exchange = bound(rank, size)
        exchange.load_state_dict({"step": STEP, "weight/P": torch.ones(10, 2),
                                  "weight/Q": torch.ones(12, 2)})  # fmt: skip
        exchange.owe({"weight": owed[rank]})
        save_exchange(exchange, model, folder)
    return torch.stack(owed).mean(0)


def load(folder: Path, model: nn.Module, size: int) -> list[LowRankExchange | None]:
    """Each rank's exchange, which has taken up what is there; None: it has not."""
    found: list[LowRankExchange | None] = []
    for rank in range(size):
        exchange = bound(rank, size)
        found.append(exchange if load_exchange(exchange, model, folder) else None)
    return found


def owe_the_mean(found: Sequence[LowRankExchange | None], mean: Tensor) -> None:
    for exchange in found:
        assert exchange is not None
        assert exchange.step == STEP
        assert set(exchange.state_dict()) == {"step", "weight/P", "weight/Q"}
        torch.testing.assert_close(exchange.owed(), {"weight": mean})


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 2), (2, 3), (3, 1), (1, 3)])
def test_other_numbers_of_ranks_owe_the_mean(tmp_path: Path, before: int, after: int) -> None:
    """DDP uses means: each of `after` ranks owes it, and so does their mean."""
    model = model_of(0)
    mean = save(tmp_path, model, before)
    assert len(saved_exchanges(tmp_path)) == before
    owe_the_mean(load(tmp_path, model, after), mean)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 3)])
def test_other_numbers_of_ranks_owe_the_sum_where_gradients_are_sums(
    tmp_path: Path, before: int, after: int
) -> None:
    model = model_of(0)
    total = save(tmp_path, model, before) * before
    for rank in range(after):
        exchange = bound(rank, after, means=False)
        assert load_exchange(exchange, model, tmp_path)
        torch.testing.assert_close(exchange.owed(), {"weight": total / after})


@pytest.mark.parametrize("after", [3, 4])
def test_files_that_more_ranks_have_left_next_to_other_weights_do_not_count(
    tmp_path: Path, after: int
) -> None:
    model = model_of(0)
    save(tmp_path, model_of(1), 4)
    assert load(tmp_path, model, after) == [None] * after
    mean = save(tmp_path, model, 2)
    assert len(saved_exchanges(tmp_path)) == 4
    owe_the_mean(load(tmp_path, model, after), mean)


@pytest.mark.parametrize(("ranks", "seed"), [(3, 0), (2, 1)], ids=["more ranks", "other weights"])
def test_files_that_are_not_of_one_time_are_not_taken_up(
    tmp_path: Path, ranks: int, seed: int
) -> None:
    """Rank 1 has not saved again: what it owed before is no part of the mean."""
    model = model_of(0)
    save(tmp_path, model_of(seed), ranks)
    save(tmp_path, model, 2, which=[0])
    assert load(tmp_path, model, 4) == [None] * 4


@pytest.mark.parametrize(
    "note",
    ["[" * 100_000, '{"ranks": 1e999, "weights": "", "values": {"exchange": {}}}'],
    ids=["brackets in brackets", "no number of ranks"],
)
def test_a_note_that_holds_what_is_too_large_is_damage(tmp_path: Path, note: str) -> None:
    file = tmp_path / "modicum_exchange_0.safetensors"
    save_file({"exchange/x": torch.ones(1)}, file, metadata={"modicum": note})
    with pytest.raises(InputError, match="damaged"):
        load_exchange(bound(0, 1), model_of(0), tmp_path)


def test_of_many_ranks_no_file_is_looked_for_after_one_that_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many there are, the file itself says."""
    model, asked = model_of(0), list[str]()
    save(tmp_path, model, 50, which=[0])
    read = exchange_file._read

    def noted(file: Path) -> Any:
        asked.append(file.stem)
        return read(file)

    monkeypatch.setattr(exchange_file, "_read", noted)
    assert load(tmp_path, model, 1) == [None]
    assert asked == [f"modicum_exchange_{rank}" for rank in (0, 0, 0, 1)]
