"""Decompositions that are kept: the same bits, damaged and full disks, room, ranks in turns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.layers import basis_cache
from modicum.core.layers.basis_cache import bases_kept_in, kept_lu, kept_svd
from modicum.core.layers.truncated_svd import truncated_svd
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.turns import by_turns


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("iterations", [None, 2])
def test_what_is_kept_has_the_bits_of_what_was_made(
    weight: Tensor, iterations: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truncated_svd(weight, 4, iterations, seed=3, name="x")
    with bases_kept_in(tmp_path / "model"):
        assert equal(kept_svd(weight, 4, iterations, seed=3, name="x"), expected)
        monkeypatch.setattr(basis_cache, "truncated_svd", None)  # nothing is made any more
        assert equal(kept_svd(weight, 4, iterations, seed=3, name="x"), expected)
        if iterations is None:
            lower = truncated_svd(weight, 2)
            assert equal(kept_svd(weight, 2), lower)
        with pytest.raises(TypeError):
            kept_svd(weight, 5, iterations, seed=3, name="x")
        with pytest.raises(TypeError):
            kept_svd(weight + 1, 4, iterations, seed=3, name="x")
    with pytest.raises(TypeError):
        kept_svd(weight, 4, iterations, seed=3, name="x")


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
def test_lu_gives_the_weight_back_in_its_order(shape: tuple[int, int], tmp_path: Path) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    with bases_kept_in(tmp_path / "model"):
        for _ in range(2):
            order, lower, upper = kept_lu(matrix)
            torch.testing.assert_close(lower @ upper, matrix[order])
            assert torch.equal(lower.diagonal(), torch.ones(min(shape), dtype=torch.float64))
            assert lower.abs().max() <= 1


def _forbidden(*_: object) -> None:
    raise PermissionError


def test_a_damaged_file_is_made_anew_and_a_place_that_cannot_be_written_costs_nothing(
    weight: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bases_kept_in(tmp_path / "model"):
        expected = kept_svd(weight, 4)
        [file] = (tmp_path / "model").glob("*")
        file.write_bytes(file.read_bytes()[:100])
        assert equal(kept_svd(weight, 4), expected)
        file.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", _forbidden)
        patched.setattr(shutil, "disk_usage", _forbidden)
        with bases_kept_in(tmp_path / "nobody" / "model"):
            assert equal(kept_svd(weight, 4), expected)
    assert not (tmp_path / "nobody").exists()
    (tmp_path / "file").write_text("no folder")
    with bases_kept_in(tmp_path / "file" / "model"):
        assert equal(kept_svd(weight, 4), expected)


def test_what_was_not_used_for_longest_goes_and_nothing_that_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(5000))
    beside = tmp_path / "other"
    beside.mkdir()
    (beside / f"svd-{'0' * 32}.safetensors").write_bytes(bytes(5000))
    weights = [torch.randn(16, 16) for _ in range(3)]
    with bases_kept_in(folder, most=5500):  # an SVD takes some 2,200
        for each in weights[:2]:
            kept_svd(each)
        kept_svd(weights[0])
        kept_svd(weights[2])
        kept = len(list(folder.glob("svd-*")))
        kept_svd(torch.randn(64, 64))  # has no room at all
    assert kept == 2
    assert len(list(folder.glob("svd-*"))) == 2
    assert (folder / "model.safetensors").exists()
    assert len(list(beside.iterdir())) == 1


def _turns(ranks: Ranks, fails: str) -> object:
    made = []

    def make(name: str, value: int) -> dict[str, Tensor]:
        made.append(name)
        if name == fails:
            raise InputError("no", value=name)
        return {"x": torch.full((value,), float(ranks.rank)), "n": torch.arange(2)}

    read = by_turns(list("abc"), make, ranks, read=lambda name, mine: ord(name) - 96)
    try:
        found = {name: tensors["x"].tolist() for name, tensors in read}
    except InputError as error:
        return str(error)
    return made, found


@pytest.mark.ranks
def test_ranks_take_turns_and_have_the_same(pool: Pool) -> None:
    found = {"a": [0.0], "b": [1.0, 1.0], "c": [0.0] * 3}
    assert pool.run(_turns, "", ranks=2) == [(["a", "c"], found), (["b"], found)]
    failed = pool.run(_turns, "b", ranks=2)
    assert "another rank has failed" in failed[0]
    assert "no" in failed[1]
