"""The sides of a comparison: what of a recipe each keeps, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.comparison.sides import RecipeSide, planned, sides_of, varied
from modicum.core.errors import InputError
from modicum.recipe import Recipe

LORA = {"method": "lora", "rank": 4, "rank_stabilized": True}


def test_an_adapter_keeps_what_both_methods_know() -> None:
    given = Recipe(model={"path": "base"}, adapter=LORA)
    lora, pissa, randlora, none = varied(given, "adapter=lora,pissa,randlora,none")
    assert lora.recipe is not None
    assert pissa.recipe is not None
    assert none.recipe is not None
    assert lora.recipe.adapter == LORA
    assert (lora.own, pissa.own, none.own) == (True, False, False)
    assert pissa.recipe.adapter == {**LORA, "method": "pissa"}
    assert randlora.recipe is not None
    assert randlora.recipe.adapter == {"method": "randlora", "rank": 4}
    assert none.recipe.adapter is None


def test_an_optimizer_keeps_nothing_of_another() -> None:
    given = Recipe(optimizer={"method": "adamw", "weight_decay": 0.3})
    adamw, sgd = varied(given, "optimizer=adamw,sgd")
    assert adamw.recipe is not None
    assert sgd.recipe is not None
    assert adamw.recipe.optimizer["weight_decay"] == 0.3
    assert sgd.recipe.optimizer == {"method": "sgd"}


def test_what_does_not_combine_is_refused_and_the_others_stay() -> None:
    lora, full = varied(Recipe(), "adapter=lora,none")
    assert lora.recipe is None
    assert "does not combine" in (lora.refused or "")
    assert full.refused is None
    assert full.recipe is not None
    assert planned(lora) is lora


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("optimiser=adamw,sgd", "Did you mean 'optimizer'"),
        ("adamw,sgd", "names no section of methods"),
        ("optimizer=", "names no section of methods"),
        ("optimizer=adamw,adamw", "names a method twice"),
        ("optimizer=adamw,sgdd", "unknown method"),
        ("optimizer=adamw,none", "this section always has a method"),
        ("optimizer=lora,adamw", "unknown method"),
    ],
)
def test_what_cannot_be_varied_is_refused(vary: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        varied(Recipe(), vary)


def written(folder: Path, name: str, steps: int) -> str:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"training: {{steps: {steps}}}\n")
    return str(file)


def test_recipes_are_sides_by_their_names(tmp_path: Path) -> None:
    one, two = written(tmp_path, "one", 5), written(tmp_path, "two", 6)
    assert [side.name for side in sides_of([one, two], None)] == ["one", "two"]
    other = written(tmp_path / "more", "one", 7)
    names = [side.name for side in sides_of([one, other], None)]
    assert len(set(names)) == 2
    assert all("/" not in name for name in names)


def test_one_side_or_two_equal_ones_are_refused(tmp_path: Path) -> None:
    one, same = written(tmp_path, "one", 5), written(tmp_path, "same", 5)
    with pytest.raises(InputError, match="two sides are equal"):
        sides_of([one, same], None)
    with pytest.raises(InputError, match="a comparison needs two"):
        sides_of([one], None)
    with pytest.raises(InputError, match="changes one recipe"):
        sides_of([one, same], "optimizer=adamw,sgd")
    with pytest.raises(InputError, match="two sides are equal"):
        sides_of([one, same], None, ["training.steps=9"])


def test_a_plan_that_cannot_be_made_is_a_refusal(tmp_path: Path) -> None:
    recipe = Recipe(data={"path": str(tmp_path / "nowhere")})
    side = planned(RecipeSide("a", recipe))
    assert side.plan is None
    assert "nowhere" in (side.refused or "")
    assert side.fits
