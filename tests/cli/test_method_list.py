"""The list of methods: by room, a line each where there is room, and as JSON."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from modicum.cli.method_list import print_methods
from modicum.cli.plain_tables import columns
from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.method import Against, Info


def text(records: list[dict[str, Any]], width: int = 80, *, as_json: bool = False) -> str:
    stream = io.StringIO()
    print_methods(records, as_json, stream, width)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_method_stands_in_its_room_and_no_line_is_too_wide(width: int) -> None:
    records = [record.as_json() for record in catalog().values()]
    lines = text(records, width).splitlines()
    assert max(map(columns, lines)) <= width
    room, found = "", {}
    for line in lines:
        if head := re.match(r"(\w+) \(\d+\) ", line):
            room = head[1]
        elif word := re.match(r"[a-z]\w+(?=  )", line):
            found[word[0]] = room
    assert found == {record["name"]: record["room"] for record in records}
    titles = " ".join(" ".join(lines).split())
    assert "frozen weights in eight bits" in titles
    # A list of so many methods is read only if it is a few screens long.
    assert len(lines) <= 3 * len(records)


def test_a_line_has_how_it_was_checked_and_both_parts_of_its_verdict() -> None:
    infos = [
        Info("a_b", "A-B: one thing", "optim", "", "", evidence="against paper"),
        Info("c", "Another: thing", "optim", "", "", evidence="verified against code",
             claim_verdict="in part", against=Against("worse", "LoRA of rank 8"),
             reason="of a long reason", run_on_gpu=True),
    ]  # fmt: skip
    records = [
        {"name": i.name, "room": i.room, "title": i.title, "status": i.status,
         "claim_verdict": i.claim_verdict, "against": vars(i.against), "loads_in": loads}
        for i, loads in zip(infos, (None, "peft, vLLM"), strict=True)
    ]  # fmt: skip
    lines = [re.split("  +", line) for line in text(records).splitlines()]
    assert lines[0] == ["optim (2)", "Checked", "Claim", "Against", "What it is"]
    assert lines[1] == ["a_b", "paper", "–", "–", "one thing"]
    assert lines[2] == ["c", "code", "in part", "worse", "Another: thing"]
    assert ["not yet run on GPU: a_b"] in lines
    assert "not yet run on GPU: all but c" in text([records[0], records[0], records[1]])
    assert "not yet run on GPU: all\n" in text(records[:1])
    assert "not yet" not in text(records[1:])
    assert re.search("c +code +in part +worse +peft, vLLM +Another", text(records, 120))


def test_as_json_nothing_is_left_out() -> None:
    records: list[dict[str, Any]] = [
        {"name": "lora", "room": "adapters", "title": "LoRA", "status": "verified", "paper": "p"},
        {"name": "x", "room": "optim", "title": "X", "status": float("nan"), "paper": "q"},
    ]
    read = json.loads(text(records, as_json=True))
    assert read == [records[0], records[1] | {"status": None}]
    assert "nan" not in text(records)
