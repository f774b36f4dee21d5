from __future__ import annotations

import json
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data import Source, TokenStore, open_source, prepare
from modicum.data.parts import Draw


def rows_file(folder: Path, count: int = 30, name: str = "rows.jsonl") -> Path:
    rows = ({"q": f"def area_{n}", "a": f"(width): return {n}" * (n % 5 + 1)} for n in range(count))
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows(folder: Path, count: int = 30, name: str = "rows.jsonl") -> Source:
    return open_source(rows_file(folder, count, name), column="a", prompt_column="q")


def contents(store: TokenStore) -> list[tuple[list[int], int]]:
    tokens = array("H" if store.token_bytes == 2 else "I", store.tokens_file.read_bytes())
    index = array("q", store.index_file.read_bytes())
    documents = [index[i : i + 4] for i in range(0, len(index), 4)]
    flags = store.trained_file.read_bytes()
    for first, length, prompt, trained in documents:
        free = max(prompt, 1)
        assert flags[first : first + length] == bytes(free) + b"\1" * (length - free)
        assert trained == length - free
    return [
        (tokens[first : first + length].tolist(), prompt) for first, length, prompt, _ in documents
    ]


@pytest.mark.parametrize("vocabulary", [300, 70_000])
def test_every_document_is_stored_with_its_prompt_and_end(tokenizer, tmp_path, vocabulary):
    source = rows(tmp_path)
    seen: list[tuple[int, int | None]] = []
    prepared = prepare(
        source,
        tokenizer,
        tmp_path / "cache",
        model_vocabulary=vocabulary,
        progress=lambda *pair: seen.append(pair),
    )
    expected = []
    for document in source.documents():
        prompt = tokenizer.encode(document.prompt or "")
        expected.append(
            ([*prompt, *tokenizer.encode(document.text), tokenizer.eos_id], len(prompt))
        )
    assert contents(prepared.train) == expected
    assert prepared.validation is None
    assert prepared.documents == prepared.train.documents == 30
    assert prepared.tokens == prepared.train.tokens == sum(len(ids) for ids, _ in expected)
    assert prepared.bytes == source.total_bytes
    assert prepared.train.token_bytes == (2 if vocabulary == 300 else 4)
    assert seen[-1] == (source.total_bytes, source.total_bytes)


def test_the_same_preparation_is_not_done_twice(tokenizer, tmp_path):
    source, seen = rows(tmp_path), []

    def again(**changed):
        options = {"model_vocabulary": 300, "draw": Draw(0.2, seed=1)} | changed
        return prepare(
            changed.pop("source", source),
            tokenizer,
            tmp_path / "cache",
            **{k: v for k, v in options.items() if k != "source"},
            progress=lambda *pair: seen.append(pair),
        )

    first = again()
    assert not first.reused
    seen.clear()
    second = again()
    assert second.reused
    assert seen == []
    assert (second.train, second.validation) == (first.train, first.validation)
    for change in (
        {"draw": Draw(0.2, seed=2)},
        {"draw": Draw(0.3, seed=1)},
        {"draw": Draw(0.2, test=0.1, seed=1)},
        {"others": {"test": source}, "draw": Draw(0.2, seed=1)},
        {"model_vocabulary": 301},
        {"source": rows(tmp_path, 31, "other.jsonl")},
    ):
        assert not again(**change).reused
    with rows_file(tmp_path).open("a") as handle:
        handle.write('{"q": "", "a": "one more"}\n')
    assert again().documents == 31


def test_a_cache_that_was_cut_or_altered_is_made_again(tokenizer, tmp_path):
    source, folder = rows(tmp_path), tmp_path / "cache"

    def again():
        return prepare(source, tokenizer, folder, model_vocabulary=300, draw=Draw(0.2))

    first = again()
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    sides = {"train.bin", "validation.bin"}
    assert set(whole) == {"tokens.bin", "trained.bin", "manifest.json"} | sides
    for name, good in whole.items():
        for bad in (None, good[:-2], b"", bytes([good[0] ^ 1]) + good[1:]):
            if bad is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(bad)
            assert again() == first  # `reused` False among it
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    (folder / "manifest.json").write_text("[]")
    assert again() == first
    assert again().reused


@pytest.mark.parametrize("name", ["tokens.bin", "manifest.json"])
def test_a_device_in_a_cache_is_not_read(tokenizer, tmp_path, name):
    source, folder = rows(tmp_path), tmp_path / "cache"
    prepare(source, tokenizer, folder, model_vocabulary=300)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert not prepare(source, tokenizer, folder, model_vocabulary=300).reused
    assert (folder / name).is_file()


def test_a_death_halfway_leaves_nothing_that_is_trusted(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    rows_file(tmp_path)
    program = """
import os, sys
from pathlib import Path
import modicum.data.document_writer as writer
from modicum.data import Tokenizer, open_source, prepare
from modicum.data.parts import Draw
here, calls = Path(sys.argv[1]), int(sys.argv[2])
writer._BATCH_DOCUMENTS = 5
def progress(done, total):
    global calls
    calls -= 1
    if calls == 0:
        os._exit(9)
source = open_source(here / "rows.jsonl", column="a", prompt_column="q")
prepare(source, Tokenizer.load(here / "tokenizer"), here / "cache", model_vocabulary=300,
        draw=Draw(0.2), progress=progress)
"""
    for calls in (1, 4):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path), str(calls)])
        assert done.returncode == 9
        assert not (tmp_path / "cache").exists()
    source = open_source(tmp_path / "rows.jsonl", column="a", prompt_column="q")
    prepared = prepare(source, tokenizer, tmp_path / "cache", model_vocabulary=300, draw=Draw(0.2))
    assert not prepared.reused
    assert prepared.documents == 30
    assert not list(tmp_path.glob(".cache*"))


def test_an_error_halfway_keeps_the_old_cache(tokenizer, tmp_path):
    source = rows(tmp_path)
    prepare(source, tokenizer, tmp_path / "cache", model_vocabulary=300)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": "x", "q": "y"}\n{"a"\n')
    with pytest.raises(InputError, match=r"bad\.jsonl:2: "):
        prepare(open_source(bad, column="a"), tokenizer, tmp_path / "cache", model_vocabulary=300)
    assert prepare(source, tokenizer, tmp_path / "cache", model_vocabulary=300).reused


def test_a_folder_with_other_files_is_left_alone(tokenizer, tmp_path):
    source = rows(tmp_path)
    with pytest.raises(InputError, match="holds other files too"):
        prepare(source, tokenizer, tmp_path, model_vocabulary=300)
    assert rows_file(tmp_path).is_file()
    for name in ("rows-train", ".rows-train.part"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    prepare(source, tokenizer, tmp_path / "cache", model_vocabulary=300)
    assert not (tmp_path / "cache" / "rows-train").exists()


def test_folders_with_numbers_for_names_are_left_alone_unless_they_hold_tokens(tokenizer, tmp_path):
    source = rows(tmp_path)
    photo = tmp_path / "photos" / "2024" / "1.jpg"
    photo.parent.mkdir(parents=True)
    photo.touch()
    with pytest.raises(InputError, match=r"holds other files too.*found: '2024'"):
        prepare(source, tokenizer, tmp_path / "photos", model_vocabulary=300)
    assert photo.exists()
    for folder in (tmp_path / "cache" / "0", tmp_path / "cache"):
        assert not prepare(source, tokenizer, folder, model_vocabulary=300).reused


def test_validation_documents_are_drawn_by_number_and_seed(tokenizer, tmp_path):
    source = rows(tmp_path)

    def sides(seed: int):
        prepared = prepare(
            source,
            tokenizer,
            tmp_path / f"cache{seed}",
            model_vocabulary=300,
            draw=Draw(0.3, seed=seed),
        )
        assert prepared.validation is not None
        return contents(prepared.train), contents(prepared.validation)

    everything = prepare(source, tokenizer, tmp_path / "all", model_vocabulary=300).train
    train, validation = sides(0)
    assert 3 <= len(validation) <= 15
    assert sorted(train + validation) == sorted(contents(everything))
    assert [d for d in contents(everything) if d not in validation] == train
    assert sides(0)[1] == validation
    assert sides(1)[1] != validation


def test_without_a_test_a_store_is_what_it_was_before_there_were_any(tokenizer, tmp_path):
    prepare(rows(tmp_path), tokenizer, tmp_path / "c", model_vocabulary=300, draw=Draw(0.2, seed=1))
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    made_from = manifest["made_from"]
    assert list(made_from) == [
        "format", "byte_order", "source", "validation_source", "validation_draw", "tokenizer",
        "model_vocabulary", "longest", "room",
    ]  # fmt: skip
    assert (made_from["format"], made_from["validation_draw"]) == (3, [0.2, 1])
    assert list(manifest["sides"]) == ["train", "validation"]


def test_the_test_is_a_part_of_the_documents_or_data_of_its_own(tokenizer, tmp_path):
    source, other = rows(tmp_path), rows(tmp_path, 4, "other.jsonl")

    def parts(name: str, **options):
        made = prepare(source, tokenizer, tmp_path / name, model_vocabulary=300, **options)
        return {part: contents(store) for part, store in made.parts.items()}

    everything = parts("all")["train"]
    drawn = parts("drawn", draw=Draw(0.2, 0.3))
    assert sorted(each for part in drawn.values() for each in part) == sorted(everything)
    assert len(drawn["test"]) > 3
    own = parts("own", draw=Draw(0.2, 0.3), others={"test": other})
    assert own["test"] == everything[:4]
    assert {**own, "test": []} == {**parts("two", draw=Draw(0.2)), "test": []}
    held = parts("held", draw=Draw(0.2, 0.3), others={"validation": other})
    assert held["validation"] == everything[:4]
    assert held["test"] == drawn["test"]


def test_one_document_cannot_be_split(tokenizer, tmp_path):
    source = rows(tmp_path, count=1)
    with pytest.raises(InputError, match=r"only one document.*validation fraction to 0"):
        prepare(source, tokenizer, tmp_path / "c", model_vocabulary=300, draw=Draw(0.1))
    assert prepare(source, tokenizer, tmp_path / "c", model_vocabulary=300).documents == 1


def test_a_validation_source_is_taken_whole(tokenizer, tmp_path):
    train, validation = rows(tmp_path, 6), rows(tmp_path, 4, "validation.jsonl")
    prepared = prepare(
        train,
        tokenizer,
        tmp_path / "cache",
        model_vocabulary=300,
        others={"validation": validation},
        draw=Draw(0.5),
    )
    assert prepared.validation is not None
    alone = prepare(train, tokenizer, tmp_path / "alone", model_vocabulary=300).train
    assert contents(prepared.train) == contents(alone)
    assert contents(prepared.validation) == contents(alone)[:4]
    assert prepared.bytes == train.total_bytes + validation.total_bytes


def test_a_token_beyond_the_model_is_named_with_its_origin(tokenizer, tmp_path):
    source = rows(tmp_path)
    worst = max(max(ids) for ids in map(tokenizer.encode, ("def area_0", "(width): return 0")))
    with pytest.raises(InputError) as caught:
        prepare(source, tokenizer, tmp_path / "cache", model_vocabulary=worst)
    token = tokenizer.token(worst)
    assert f"token {worst} ({token!r}) in rows.jsonl:1, " in str(caught.value)
    assert f"vocabulary ends at {worst - 1};" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_an_example_that_is_too_long_is_refused_by_its_line(tokenizer, tmp_path):
    source = rows(tmp_path)
    lengths = [
        len(tokenizer.encode(each.prompt or "") + tokenizer.encode(each.text)) + 1
        for each in source.documents()
    ]
    longest = max(lengths)
    first = lengths.index(longest) + 1
    with pytest.raises(InputError, match=rf"rows\.jsonl:{first} has {longest} tokens.*too_long"):
        prepare(source, tokenizer, tmp_path / "a", model_vocabulary=300, longest=longest - 1)
    prepare(source, tokenizer, tmp_path / "b", model_vocabulary=300, longest=longest)


def test_continuous_text_has_no_flags_and_no_longest(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("def area(width): return width\n" * 9)
    source = open_source(tmp_path / "a.txt")
    prepared = prepare(source, tokenizer, tmp_path / "a", model_vocabulary=300, longest=5)
    assert not prepared.train.examples
    assert not prepared.train.trained_file.exists()
