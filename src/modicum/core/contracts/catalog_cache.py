"""The records of the built-in methods in the user's cache, as long as no file has changed."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modicum.core.contracts import source_reading
from modicum.core.contracts.method import Against, Info
from modicum.core.contracts.method_record import MethodRecord
from modicum.core.contracts.search import SearchTable
from modicum.core.errors import InputError
from modicum.core.files import regular, user_cache, write_json


def _cache_file() -> Path:
    place = f"{source_reading.SOURCES} {sys.version}"
    return user_cache("catalog") / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


def keep(stamp: list[Any], records: list[MethodRecord]) -> None:
    """Write what was read, for the next process; where that cannot be, it reads them again."""
    rows = [
        asdict(record.info)
        | {"_file": str(record.file), "_class": record.class_name, "_summary": record.summary}
        | {"_defaults": _written(record.defaults), "_module": record.module}
        | {"_search": record.own_search and record.own_search.as_json()}
        for record in records
    ]
    with suppress(InputError, OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"stamp": stamp, "methods": rows})


def _written(defaults: Mapping[str, Any]) -> str:
    """A dictionary's literal, as `ast.literal_eval` reads it."""
    pairs = (f"{k!r}: {'...' if v is ... else repr(v)}" for k, v in defaults.items())
    return f"{{{', '.join(pairs)}}}"


def kept(stamp: list[Any]) -> list[MethodRecord] | None:
    """The records of the cache; None where there are none of these files."""
    try:
        content = json.loads(regular(_cache_file()).read_bytes())
        if content["stamp"] != stamp:
            return None
        return [_from_row(row) for row in content["methods"]]
    except (OSError, InputError, RuntimeError):
        return None  # there is none that can be read
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, MemoryError):
        return None  # it is damaged


def _from_row(row: dict[str, Any]) -> MethodRecord:
    names = ("file", "class", "summary", "defaults", "module", "search")
    own = {key: row.pop(f"_{key}") for key in names}
    row["traits"] = tuple(row["traits"])
    row["against"] = Against(**row["against"])
    for key in ("traits_if", "traits_unless", "excludes"):
        row[key] = tuple(tuple(each) for each in row[key])
    defaults = ast.literal_eval(own["defaults"])
    if not isinstance(defaults, dict):
        raise ValueError("no fields")
    file, module = Path(own["file"]), str(own["module"])
    table = None if own["search"] is None else SearchTable.from_json(own["search"])
    return MethodRecord(Info(**row), file, own["class"], defaults, own["summary"], module, table)
