"""What the catalog reads from syntax trees is what importing a method gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.contracts.catalog import MethodRecord, catalog, of_value, read_file

RECORDS = [
    *catalog().values(),
    *(
        record
        for file in sorted((Path(__file__).parent / "plugins").glob("*.py"))
        for record in read_file(file)
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_the_catalog_sees_what_importing_gives(record: MethodRecord) -> None:
    method = record.load()
    assert record.info == method.info
    assert record.own_search == method.search
    assert record.class_name == method.__name__
    assert record.summary == (method.__doc__ or "").strip().split("\n")[0]
    assert list(record.fields) == list(method.model_fields)
    for name, field in method.model_fields.items():
        seen = record.model.model_fields[name]
        assert seen.default == field.default
        assert seen.is_required() == field.is_required()
        assert seen.annotation == field.annotation
        assert sorted(map(repr, seen.metadata)) == sorted(map(repr, field.metadata))
    ours, theirs = record.model.model_json_schema(), method.model_json_schema()
    assert ours.get("properties") == theirs.get("properties")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_value_leads_back_to_its_record(record: MethodRecord) -> None:
    assert of_value(record.load()()) == record
