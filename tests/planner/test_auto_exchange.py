"""`comm: auto`: what it becomes by the link, what it never takes unasked, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.ranks import Ranks
from modicum.planner import planning
from modicum.planner.choose import Room
from modicum.planner.planning import plan
from modicum.recipe import Recipe
from modicum.recipe_yaml import dump, parse

LOSSY: list[dict[str, Any]] = [
    {"method": "dense_sums", "dtype": "bf16"},
    {"method": "acp_sgd", "rank": 2},
]


def at(monkeypatch: pytest.MonkeyPatch, rate: float | None) -> None:
    links = {} if rate is None else {"local": MeasuredLink(1e-5, rate, 0.0, 2, "now")}
    monkeypatch.setattr(planning, "known_links", lambda: links)


def chosen(new: Any, ranks: int = 2, **comm: Any) -> tuple[Any, str]:
    recipe = new(
        parallel={"strategy": "ddp"}, training={"batch_size": 8}, comm={"method": "auto", **comm}
    )
    made = plan(recipe, ranks=ranks)
    [why] = [row["why"] for row in made.choices if row["field"] == "comm"]
    return made.recipe.comm, why


def test_a_fast_link_sends_numbers_as_they_are(new, monkeypatch) -> None:
    at(monkeypatch, 1e12)
    comm, why = chosen(new, among=LOSSY)
    assert comm is None
    assert "with acp_sgd" in why


def test_a_slow_link_takes_what_is_listed_and_nothing_lossy_that_is_not(new, monkeypatch) -> None:
    at(monkeypatch, 1e4)
    comm, _ = chosen(new, among=LOSSY)
    assert comm is not None
    assert comm["method"] == "acp_sgd"
    assert comm["rank"] == 2
    comm, why = chosen(new)
    assert comm is None or comm == {"method": "dear"}
    assert "dense_sums" not in why
    assert "acp_sgd" not in why
    comm, _ = chosen(new, among=LOSSY[:1])
    assert comm is not None
    assert comm["method"] == "dense_sums"


def test_without_a_link_or_with_one_rank_nothing_is_guessed(new, monkeypatch) -> None:
    at(monkeypatch, None)
    comm, why = chosen(new, among=LOSSY)
    assert comm is None
    assert "modicum bench link" in why
    assert chosen(new, ranks=1, among=LOSSY) == (None, "there is one rank, and nothing travels")


def test_a_way_for_which_there_is_no_room_is_not_taken(new, monkeypatch) -> None:
    at(monkeypatch, 1e4)
    owes_nothing = lambda _, found: all("owed" not in e.what for e in found.ledger.entries)  # noqa: E731
    monkeypatch.setattr(Room, "holds", owes_nothing)
    comm, why = chosen(new, among=LOSSY)
    assert comm is not None
    assert comm["method"] == "dense_sums"
    assert why.endswith("; without acp_sgd, rank 2: it does not fit")


def test_each_way_that_is_listed_has_its_fields_in_the_reason_and_its_row(new, monkeypatch) -> None:
    at(monkeypatch, 1e4)
    among = [*({"method": "acp_sgd", "rank": rank} for rank in (1, 4)), LOSSY[0]]
    recipe = new(
        parallel={"strategy": "ddp"},
        training={"batch_size": 8},
        comm={"method": "auto", "among": among},
    )
    made = plan(recipe, ranks=2, advise=True)
    [why] = [row["why"] for row in made.choices if row["field"] == "comm"]
    assert "s with acp_sgd, rank 1; " in why
    assert " s with acp_sgd, rank 4; " in why
    rows = made.row()["exchanges"]
    ways = [row["comm"] for row in rows]
    assert [way for way in ways if way in among] == among
    assert [way["method"] for way in ways if way] == [
        *("dear", "powersgd", "acp_sgd", "acp_sgd", "dense_sums")
    ]
    [here] = [row for row in rows if row["here"]]
    assert here["comm"] == made.recipe.comm == among[0]
    assert here["bytes"] == made.prediction.wire_bytes


def test_a_way_is_tried_in_the_layout_that_it_goes_with(new, monkeypatch) -> None:
    at(monkeypatch, 1e5)
    among = [{"method": "sdp4bit"}]
    recipe = new(training={"batch_size": 8}, comm={"method": "auto", "among": among})
    made = plan(recipe, ranks=2, advise=True)
    assert plan(recipe.changed(comm=None), ranks=2).row()["layout"]["name"] == "ddp"
    assert (made.recipe.comm, made.row()["layout"]["name"]) == (among[0], "zero")
    assert [row["comm"] for row in made.row()["exchanges"] if row["here"]] == among
    at(monkeypatch, 1e12)
    fast = plan(recipe, ranks=2, advise=True)
    assert fast.row()["layout"]["name"] == "ddp"
    [row] = [row for row in fast.row()["exchanges"] if row["comm"] == among[0]]
    assert row["bytes"] == made.prediction.wire_bytes
    comm, why = chosen(new, among=among)  # with ddp
    assert comm is None
    assert "; without sdp4bit: sdp4bit does not combine with" in why
    assert "set parallel.strategy to zero" in why


def test_a_link_between_processors_says_nothing_of_accelerators(monkeypatch) -> None:
    at(monkeypatch, 1e4)
    assert planning._link(Ranks(), 2, None, "cpu") is not None
    assert planning._link(Ranks(), 2, None, "cuda") is None


def test_text_and_python_spell_it_alike(tmp_path: Path) -> None:
    short, long = Recipe(comm="auto"), Recipe(comm={"method": "auto"})
    assert short == long
    assert short.method("comm") is None
    assert short.plain()["comm"] == {"method": "auto", "among": []}
    values, _ = parse(dump(Recipe(comm={"method": "auto", "among": LOSSY})), "recipe.yaml")
    again = Recipe(**values)
    assert again.comm is not None
    assert again.comm["among"][1]["rank"] == 2
    assert again.comm["among"][1]["start_after"] == 0


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"amog": []}, "comm.amog"),
        ({"among": "acp_sgd"}, "comm.among"),
        ({"among": 0}, "comm.among"),
        ({"among": {}}, "comm.among"),
        ({"among": ["acp_sgd"]}, "comm.among.0"),
        ({"among": [{"method": "auto"}]}, "comm.among.0.method"),
        ({"among": [{"method": "lora"}]}, "comm.among.0.method"),
        ({"among": [{"method": "acp_sgd", "rang": 2}]}, "comm.among.0.rang"),
    ],
)
def test_what_is_wrong_with_it_is_named(section: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        Recipe(comm={"method": "auto", **section})
    assert caught.value.field == field
