"""Images of files as arrays: what becomes of sizes, colours and damaged files."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from modicum.core.errors import InputError
from modicum.data import image_arrays
from modicum.data.image_arrays import Shaping, read_arrays, write_arrays
from modicum.data.image_files import find_images
from modicum.data.parts import Draw

Image = pytest.importorskip("PIL.Image")
RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def pixels(shaping: Shaping, path: Path) -> torch.Tensor:
    found = torch.frombuffer(bytearray(shaping.array(path)), dtype=torch.uint8)
    return found.view(shaping.channels, shaping.size, shaping.size)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """8 pixels high and 16 wide: red, and green in the middle 8."""
    image = Image.new("RGB", (16, 8), RED)
    image.paste(GREEN, (4, 0, 12, 8))
    image.save(tmp_path / "wide.png")
    return tmp_path / "wide.png"


def test_a_named_rule_says_how_sizes_are_made_to_fit(wide: Path) -> None:
    crop = pixels(Shaping(8, "crop"), wide)
    assert crop.shape == (3, 8, 8)
    assert (crop[1] == 255).all()
    assert (crop[0] == 0).all()
    stretch = pixels(Shaping(8, "stretch"), wide)
    assert stretch[0, :, 0].tolist() == [255] * 8
    assert stretch[1, :, 3].tolist() == [255] * 8
    pad = pixels(Shaping(8, "pad"), wide)
    assert (pad[:, 0] == 0).all()
    assert pad[0, 3, 0] == 255
    assert pixels(Shaping(4, colour="grey"), wide).shape == (1, 4, 4)


def test_rotation_transparency_and_palettes_are_undone(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (9, 9, 9, 0))
    clear.save(tmp_path / "clear.png")
    assert (pixels(Shaping(4), tmp_path / "clear.png") == 255).all()
    turned = Image.new("RGB", (8, 16), RED)
    turned.paste(GREEN, (0, 0, 8, 8))  # above; turned by 90 degrees, at the right
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=100)
    found = pixels(Shaping(8, "stretch"), tmp_path / "turned.jpg")
    assert found[1, :, 7].float().mean() > 200
    assert found[1, :, 0].float().mean() < 50
    Image.new("RGB", (4, 4), RED).convert("P").save(tmp_path / "palette.png")
    assert pixels(Shaping(4), tmp_path / "palette.png")[0].eq(255).all()


def test_a_damaged_file_is_named(tmp_path: Path, wide: Path) -> None:
    whole = wide.read_bytes()
    for name, content in (("half", whole[: len(whole) // 2]), ("text", b"hello"), ("none", b"")):
        file = tmp_path / f"{name}.png"
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}.png: is no PNG or JPEG, or is damaged"):
            Shaping(8).array(file)
    Image.new("I;16", (4, 4)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="more than 8 bits a channel"):
        Shaping(8).array(tmp_path / "deep.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "bitmap.png", format="BMP")
    with pytest.raises(InputError, match="is no PNG or JPEG"):
        Shaping(8).array(tmp_path / "bitmap.png")


def test_of_large_images_one_is_decoded_at_a_time(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Shaping(8).array(wide)
    monkeypatch.setattr(image_arrays, "_LARGE", 16 * 8)
    with image_arrays._in_turn:
        assert Shaping(8).array(wide) == expected
    monkeypatch.setattr(image_arrays, "_LARGE", 16 * 8 - 1)
    with ThreadPoolExecutor(1) as threads:
        with image_arrays._in_turn:
            found = threads.submit(Shaping(8).array, wide)
            with pytest.raises(TimeoutError):
                found.result(timeout=0.2)
        assert found.result() == expected


def test_pillow_is_asked_for(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"reading images needs PIL.Image.*modicum\[images\]"):
        Shaping(8).array(wide)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of 300 images together, so that they are decoded some at a time."""
    root = tmp_path / "images"
    for label, shade in (("dark", 10), ("light", 200)):
        (root / label).mkdir(parents=True)
        for n in range(150):
            Image.new("L", (5, 5), shade + n % 40).save(root / label / f"{n:03}.png")
    return root


def test_arrays_are_made_once_and_again_when_something_changed(
    folder: Path, tmp_path: Path
) -> None:
    files, out = find_images(folder, draw=Draw(0.1)), tmp_path / "data"
    seen: list[tuple[int, int | None]] = []
    write_arrays(files, Shaping(4, colour="grey"), out, lambda *done: seen.append(done))
    assert seen == [(256, 300), (300, 300)]
    found = read_arrays(out)
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (270, 30)
    batch = found.train.batch([0, 269])
    assert batch.labels.tolist() == [0, 1]
    shade = int(files.train[269].name.split("/")[1][:3]) % 40 + 200
    torch.testing.assert_close(batch.images[1], torch.full((1, 4, 4), (shade - 127.5) / 64))
    card = json.loads((out / "images.json").read_text())
    assert card == {
        "classes": ["dark", "light"], "size": 4, "fit": "crop", "colour": "grey", "middle": 127.5,
        "deviation": 64.0,
    }  # fmt: skip
    seen.clear()
    write_arrays(files, Shaping(4, colour="grey"), out, lambda *done: seen.append(done))
    assert seen == []
    assert read_arrays(out).digest == found.digest
    Image.new("L", (5, 5), 0).save(files.train[0].path)
    write_arrays(files, Shaping(4, colour="grey"), out)
    assert read_arrays(out).digest != found.digest
    assert read_arrays(out).train.batch([0]).images.eq(-127.5 / 64).all()


def test_the_first_images_that_are_held_out_are_of_all_classes(
    folder: Path, tmp_path: Path
) -> None:
    write_arrays(find_images(folder, draw=Draw(0.2)), Shaping(4, colour="grey"), tmp_path / "data")
    held = read_arrays(tmp_path / "data").validation
    assert held is not None
    every = held.batch(range(len(held)))
    assert every.labels.bincount().tolist() == [30, 30]
    assert set(every.labels[:10].tolist()) == {0, 1}
    # An image keeps its label: dark ones are below the middle.
    assert torch.equal(every.images.mean((1, 2, 3)) > 0, every.labels == 1)
