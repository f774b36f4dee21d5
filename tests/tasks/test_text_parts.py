"""How ranks share the work of making text ready: one writes, the others map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.data.example_table import ExampleTable
from modicum.data.sources import Source
from modicum.data.token_store import written
from modicum.recipe import Recipe
from modicum.tasks import text, text_parts


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Examples and running text of two sources, in plain values."""
    folder = tmp_path_factory.mktemp("parts")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(50)))
    (folder / "texts").mkdir()
    for n in range(4):
        (folder / "texts" / f"{n}.md").write_text(f"text number {n} " * 20)
    return {
        "data": {
            "sources": [{"path": str(rows)}, {"path": str(folder / "texts")}],
            "sequence_length": 16,
            "validation_fraction": 0.3,
        },
        "model": {"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280},
        "training": {"batch_size": 4},
    }


def prepares(ranks: Ranks, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a rank finds; those but the first can neither tokenize nor pack nor read the sources."""
    asked = Recipe(**values)
    inputs = text.look(asked)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank does the first one's work again")

    with pytest.MonkeyPatch.context() as patched:
        if not ranks.first:
            patched.setattr(text_parts, "prepare", refuse)
            patched.setattr(ExampleTable, "of", refuse)
            patched.setattr(Source, "documents", refuse)
        data = text.prepared(asked, inputs, folder, lambda *_: None, ranks)
    assert data.validation is not None
    return {
        "first": [data.train.batch(data.sampler.indices(n)).input_ids.tolist() for n in range(9)],
        "validation": data.validation.batch(range(len(data.validation))).labels.tolist(),
        "counts": data.counts,
        "identity": data.identity,
    }


@pytest.mark.ranks
def test_one_rank_prepares_and_the_others_map_what_it_wrote(
    pool: Pool, recipe: dict[str, Any], tmp_path: Path
) -> None:
    one, *others = pool.run(prepares, recipe, tmp_path / "run", ranks=3)
    assert one["counts"]["rows"] > 10
    assert all(other == one for other in others)
    # Once more: nothing is made anew.
    folders = list((tmp_path / "run" / "data").rglob("*.bin"))
    before = {path: path.stat().st_mtime_ns for path in folders}
    assert pool.run(prepares, recipe, tmp_path / "run", ranks=2) == [one, one]
    assert before == {path: path.stat().st_mtime_ns for path in folders}
    assert {path.parent.name for path in folders} == {"0", "1", "rows-train", "rows-validation"}


@pytest.mark.parametrize("name", ["tokens.bin", "rows-train/pieces.bin", "rows-train/spans.bin"])
def test_what_was_damaged_is_made_again(recipe: dict[str, Any], tmp_path: Path, name: str) -> None:
    asked = Recipe(**recipe)
    inputs = text.look(asked)

    def rows() -> list[Any]:
        data = text.prepared(asked, inputs, tmp_path, lambda *_: None, Ranks())
        return [data.train.batch([n]).labels.tolist() for n in range(len(data.train))]

    expected = rows()
    damaged = tmp_path / "data" / "0" / name
    content = damaged.read_bytes()
    damaged.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert rows() == expected
    assert damaged.read_bytes() == content


def test_ranks_that_see_another_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not seen by this rank .* all ranks need one folder"):
        written(tmp_path, "0" * 64)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="not the one that rank 0 wrote"):
        written(tmp_path, "0" * 64)
