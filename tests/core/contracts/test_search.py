"""Tables of what may be tuned, and what the catalog reads of them without importing a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.core.contracts.test_search_ranges import integers, numbers

from modicum.core.contracts import catalog as home
from modicum.core.contracts.catalog import catalog, read_file
from modicum.core.contracts.method import Info
from modicum.core.contracts.search import (
    IntegerRange,
    LinearRange,
    LogRange,
    SearchChoice,
    SearchTable,
    range_from_json,
)
from modicum.core.contracts.search_check import RECIPE_FIELDS, field_bounds
from modicum.core.contracts.search_defaults import room_search
from modicum.core.contracts.search_ranges import FieldBounds
from modicum.core.errors import InputError

PLUGIN = '''
from __future__ import annotations
from typing import Annotated, Literal
from pydantic import Field
import there_is_no_such_module
from modicum.core.contracts.method import Info, Method, PositiveInt
from modicum.core.contracts.search import (
    IntegerRange, LinearRange, LogRange, SearchChoice, SearchTable,
)

class Mine(Method):
    """Does nothing, well."""
    info = Info(name="mine", title="Mine", room="adapters", paper="none", claim="none")
    search = {table}
    rank: PositiveInt = 4
    some: PositiveInt | None = None
    kind: Literal["a", "b"] = "a"
    scale: Annotated[float, Field(ge=0, lt=2)] = 1.0
    tiles: Annotated[int, Field(multiple_of=32)] = 64
    betas: tuple[float, float] = (0.9, 0.95)
'''
FIRST = 14  # the line on which the table begins


def plugin(folder: Path, table: str) -> Path:
    file = folder / "mine.py"
    file.write_text(PLUGIN.replace("{table}", table), encoding="utf-8")
    return file


@given(numbers())
def test_numbers_come_back_from_their_plain_values(known: LogRange | LinearRange) -> None:
    assert range_from_json(known.as_json()) == known


@given(integers())
def test_integers_come_back_from_their_plain_values(known: IntegerRange) -> None:
    assert range_from_json(known.as_json()) == known


def test_a_table_comes_back_from_its_plain_values_in_its_order() -> None:
    table = SearchTable(
        {
            "rank": IntegerRange(2, 64, 8, log=True, step=2),
            "betas": SearchChoice(((0.9, 0.95), (0.9, 0.999)), (0.9, 0.95)),
            "learning_rate": LogRange(1e-4, 1e-1, 1e-3),
            "mask": SearchChoice(("rand", None), None),
        },
        size="rank",
    )
    again = SearchTable.from_json(table.as_json())
    assert again == table
    assert list(again.fields) == list(table.fields)
    assert hash(again) == hash(table)
    assert list(table.tuned) == ["betas", "learning_rate", "mask"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"fields": {}},
        {"fields": [], "size": None},
        {"fields": {"rank": {"kind": "log"}}, "size": None},
        {"fields": {"rank": {"kind": "cubic", "low": 1}}, "size": None},
        {"fields": {"rank": {"low": 1.0, "high": 2.0, "default": 1.0}}, "size": None},
        {"fields": {"rank": 3}, "size": None},
        {"fields": {}, "size": "rank"},
    ],
)
def test_plain_values_of_no_table_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SearchTable.from_json(values)


def test_a_table_is_a_value_of_its_own() -> None:
    fields = {"rank": IntegerRange(1, 8, 2)}
    table = SearchTable(fields)  # type: ignore[arg-type]
    fields.clear()
    assert list(table.fields) == ["rank"]
    with pytest.raises(AttributeError):
        table.size = "rank"  # type: ignore[misc]
    with pytest.raises(InputError, match=r"search\.rank: is no range \(found: 3\); allowed: Log"):
        SearchTable({"rank": 3})  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"search\.size.*Did you mean 'rank'\?"):
        SearchTable(table.fields, size="rnak")


def test_a_method_s_table_comes_before_its_room_s() -> None:
    rate, ranks = LogRange(1e-3, 1.0, 1e-2), IntegerRange(1, 8, 2)
    room = room_search(Info("a", "A", "adapters", "", ""))
    over = SearchTable({"rank": ranks}, "rank").over(room)
    assert list(over.fields) == ["learning_rate", "rank", "warmup", "weight_decay"]
    assert (over.size, over.fields["learning_rate"]) == ("rank", room.fields["learning_rate"])
    own = SearchTable({"rank": ranks, "learning_rate": rate}).over(room)
    assert list(own.fields) == ["learning_rate", "rank", "warmup", "weight_decay"]
    assert own.fields["learning_rate"] == rate


def test_every_room_with_a_section_in_recipes_has_a_table() -> None:
    from modicum.recipe.slots import SLOTS

    for slot, room in SLOTS.items():
        fields = room_search(Info("a", "A", room, "", "", slot=slot)).fields
        assert ("learning_rate" in fields) == (slot not in ("diagnosis", "watchdog"))
        assert set(fields) <= set(RECIPE_FIELDS)
    assert room_search(Info("a", "A", "solvers", "", "")) == SearchTable()


def test_bounds_are_those_of_the_type() -> None:
    bounds = {name: field_bounds(kind) for name, kind in RECIPE_FIELDS.items()}
    assert bounds == {
        "learning_rate": FieldBounds(0, None, low_open=True),
        "warmup": FieldBounds(0, 1, high_open=True),
        "weight_decay": FieldBounds(0, None),
        "batch_size": FieldBounds(1, None),
    }
    assert field_bounds(str) == FieldBounds()
    record = catalog()["svfit"]
    assert record.bounds("rank") == FieldBounds(1, None)  # an integer or null
    assert record.bounds("warmup") == FieldBounds(0, 1, high_open=True)
    with pytest.raises(InputError, match=r"svfit has no such name.*Did you mean 'rank'"):
        record.bounds("rnak")


def test_a_plugin_s_table_is_read_without_running_it(tmp_path: Path) -> None:
    table = """SearchTable(
        {
            "rank": IntegerRange(1, 64, 4, log=True),
            "some": IntegerRange(1, 64, 16),
            "kind": SearchChoice(("a", "b"), "a"),
            "scale": LinearRange(0.0, 1.9, 1.0),
            "tiles": IntegerRange(32, 256, 64, step=32),
            "betas": SearchChoice(((0.9, 0.95), (0.9, 0.999)), (0.9, 0.95)),
            "learning_rate": LogRange(1e-3, 1.0, 1e-2),
            "batch_size": IntegerRange(8, 64, 32, log=True),
        },
        size="rank",
    )"""
    [record] = read_file(plugin(tmp_path, table))
    assert "there_is_no_such_module" not in sys.modules
    assert record.own_search is not None
    assert record.own_search.fields["learning_rate"] == LogRange(1e-3, 1.0, 1e-2)
    assert list(record.search.fields)[-2:] == ["warmup", "weight_decay"]
    assert record.search.size == "rank"
    assert record.bounds("scale") == FieldBounds(0, 2, high_open=True)
    assert record.as_json()["search"]["of"] == "method"


def test_a_plugin_without_a_table_has_its_room_s(tmp_path: Path) -> None:
    [record] = read_file(plugin(tmp_path, "None"))
    assert record.own_search is None
    assert record.search == room_search(record.info)
    assert record.as_json()["search"]["of"] == "room"


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        (
            'SearchTable({\n"rnak": IntegerRange(1, 8, 4)})',
            FIRST + 1,
            "search.rnak: neither a field of the method nor one of the recipe's names; allowed: "
            "rank, some, kind, scale, tiles, betas, learning_rate, warmup, weight_decay, "
            "batch_size. Did you mean 'rank'?",
        ),
        (
            'SearchTable({"scale": LinearRange(0.0, 1.0, 1.0),\n"rank": IntegerRange(0, 8, 4)})',
            FIRST + 1,
            "search.rank: too small (found: 0); allowed: at least 1",
        ),
        (
            'SearchTable({"scale": LinearRange(0.0, 2.0, 1.0)})',
            FIRST,
            "search.scale: too large (found: 2.0); allowed: below 2.0",
        ),
        (
            'SearchTable({"tiles": IntegerRange(32, 256, 64)})',
            FIRST,
            "search.tiles: must be a multiple of 32 (found: ",
        ),
        (
            'SearchTable({"rank": LogRange(1, 8, 4)})',
            FIRST,
            "search.rank: expected an integer (found: 1.0)",
        ),
        (
            'SearchTable({"kind": SearchChoice(("a", "c"), "a")})',
            FIRST,
            "search.kind: not one of the known words (found: 'c'); allowed: 'a' or 'b'",
        ),
        (
            'SearchTable({"warmup": LinearRange(0.0, 1.0, 0.1)})',
            FIRST,
            "search.warmup: too large (found: 1.0); allowed: below 1.0",
        ),
        (
            'SearchTable({"rank": IntegerRange(1, 8, 2)})',
            FIRST,
            "search.rank: the field's own default is 4, and that of its range must be the same "
            "(found: 2)",
        ),
        (
            'SearchTable({"rank": IntegerRange(8, 1, 4)})',
            FIRST,
            "low: must be below `high` (found: 8)",
        ),
        (
            'SearchTable({"rank": IntegerRange(5, 8, 4)})',
            FIRST,
            "default: lies outside of the range (found: 4); allowed: 5 to 8",
        ),
        (
            'SearchTable({"rank": IntegerRange(1, 8, 4)}, size="density")',
            FIRST,
            "search.size: sets the size, so it must have a range (found: 'density'); allowed: rank",
        ),
        ("3", FIRST, "`search` must be a SearchTable(...) of literals"),
        (
            'SearchTable({"rank": IntegerRange(1, 8, LARGEST)})',
            FIRST,
            "cannot be read without running the file (name 'LARGEST' is not defined)",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(
    tmp_path: Path, table: str, line: int, message: str
) -> None:
    file = plugin(tmp_path, table)
    with pytest.raises(InputError) as caught:
        catalog([file])
    said = str(caught.value)
    assert said.startswith(f"{file}:{line}: ")
    assert message in said


HEIR = """
from modicum.adapters.lora import LoRA
from modicum.core.contracts.method import Info, PositiveInt
from modicum.core.contracts.search import SearchTable

class Heir(LoRA):
    \"\"\"LoRA of another rank.\"\"\"
    info = Info(name="heir", title="Heir", room="adapters", paper="none", claim="none")
    {body}
"""


def heir(folder: Path, body: str) -> Any:
    (folder / "heir.py").write_text(HEIR.replace("{body}", body), encoding="utf-8")
    [record] = read_file(folder / "heir.py")
    return record


def test_a_table_is_inherited_with_the_defaults_that_the_class_has(tmp_path: Path) -> None:
    lora = catalog()["lora"].own_search
    assert heir(tmp_path, "pass").own_search == lora
    other = heir(tmp_path, "rank: PositiveInt = 16").own_search
    assert other.fields["rank"] == IntegerRange(1, 128, 16, log=True)
    assert other.size == "rank"
    far = heir(tmp_path, "rank: PositiveInt = 4096").own_search  # outside of LoRA's range
    assert (dict(far.fields), far.size) == ({}, None)
    assert heir(tmp_path, "search = None").own_search is None
    assert heir(tmp_path, "search = SearchTable()").own_search == SearchTable()


def test_the_cache_keeps_tables_and_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home._built_in.cache_clear()
    try:
        first = catalog()
        home._built_in.cache_clear()
        monkeypatch.setattr(home, "read_file", None)
        again = catalog()
    finally:
        home._built_in.cache_clear()
    for name, record in first.items():
        assert again[name].own_search == record.own_search
        assert list(again[name].search.fields) == list(record.search.fields)
