from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modicum.core.errors import InputError
from modicum.models import tensor_pieces
from modicum.models.safetensors_file import TensorEntry, TensorReader, read_entries
from modicum.models.tensor_pieces import TensorPiece, read_into, read_pieces

FULL = torch.arange(5 * 4 * 3, dtype=torch.float32).reshape(5, 4, 3)


@pytest.fixture
def entry(tmp_path: Path) -> TensorEntry:
    file = tmp_path / "model.safetensors"
    save_file({"other": torch.ones(7), "full": FULL, "one": torch.tensor(2.5)}, file)
    return read_entries(file)["full"]


@pytest.mark.parametrize("most", [1, 16, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_any_size_fill_the_target(
    entry: TensorEntry, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pieces, "_AT_ONCE", most)
    for before, rows in [(0, 5), (1, 3), (4, 1), (5, 0)]:
        target = torch.full((rows, 4, 3), -1.0, dtype=dtype)
        read_into(entry, target, before)
        assert torch.equal(target, FULL[before : before + rows].to(dtype))


def test_a_number_alone_is_read(entry: TensorEntry) -> None:
    target = torch.zeros(())
    read_into(read_entries(entry.file)["one"], target)
    assert target.item() == 2.5


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_transposed_pieces_and_parts_of_columns_go_to_their_places(
    entry: TensorEntry, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pieces, "_AT_ONCE", most)
    view = torch.empty(5, 4, 3, device="meta")
    left, right = view[1:4, :, :1], view[1:4, :, 1:]
    pieces = [
        TensorPiece(0, right.transpose(0, 1), (0, 0, 0)),
        TensorPiece(0, left.transpose(0, 1), (0, 0, 2)),
    ]
    expected = torch.cat([FULL[1:4, :, 1:], FULL[1:4, :, :1]], 2).transpose(0, 1)
    for before, rows in [(0, 4), (2, 2)]:
        target = torch.zeros(rows, 3, 3)
        read_pieces([entry], pieces, target, before)
        assert torch.equal(target, expected[before : before + rows])


@pytest.mark.parametrize("shape", [(6, 4, 3), (5, 4, 5), (5, 5, 3)])
def test_a_target_of_another_shape_is_refused(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="60 elements are in the files"):
        read_into(entry, torch.zeros(shape))


def test_a_file_is_opened_again_where_much_of_it_was_read(
    entry: TensorEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors

    opened, own = [], safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *a, **k: opened.append(a) or own(*a, **k))
    files = TensorReader(100)  # a row has 48 bytes
    for row in range(5):
        assert torch.equal(files.read(entry, row, 1), FULL[row : row + 1])
    assert len(opened) == 3
    entry.file.write_bytes(b"")
    with pytest.raises(InputError, match="cannot be read"):
        TensorReader(100).read(entry)
