"""The text of a recipe is read back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.planner.starting.draft import Setting
from modicum.planner.starting.recipe_text import recipe_text
from modicum.recipe_yaml import load


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        (1.5e-5, "1.5e-5"),
        (2.5e-5, "2.5e-5"),
        (2.5e6, "2500000"),
        (0.123456789, "0.123456789"),
        (1e-5, "1e-5"),
        (2e-4, "0.0002"),
        (3e-10, "3e-10"),
        (1e16, "1e+16"),
    ],
)
def test_a_number_is_read_back_to_the_bit(value: float, spelled: str, tmp_path: Path) -> None:
    text = recipe_text([Setting("training.learning_rate", value, "as asked for")])
    assert text.split()[:3] == ["training:", "learning_rate:", spelled]
    file = tmp_path / "made.yaml"
    file.write_text(text)
    assert load(file).training.learning_rate == value
