"""Data sets of the hub: by a stand-in of `datasets`, and by the library where it is installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.data import open_source
from modicum.data.hub import HubName, hub_files

README = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/train.jsonl}
  - {split: test, path: easy/test.jsonl}
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder like a data set's repository, with two configurations."""
    folder = tmp_path / "sums"
    (folder / "easy").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for name, count in (("easy/train", 3), ("easy/test", 1), ("hard", 2)):
        rows = "".join(f'{{"text": "{name} {n}"}}\n' for n in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
    return folder


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, offline, with a cache of its own."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


class Stand:
    """As much of `datasets` as is used, with one Arrow file as its answer to all."""

    __version__ = "4.0.0"

    def __init__(self, file: Path, reader: str = "parquet", error: Exception | None = None) -> None:
        self.file, self.error, self.asked = file, error, []
        module = f"datasets.packaged_modules.{reader}.{reader}"
        self.builder = type("Builder", (), {"__module__": module})()
        self.bars = True

    def load_dataset_builder(self, *names: Any, **settings: Any) -> Any:
        self.asked.append((names, settings))
        if self.error is not None:
            raise self.error
        return self.builder

    def load_dataset(self, *names: Any, **settings: Any) -> Any:
        self.asked.append((names, settings))
        assert not self.bars
        return SimpleNamespace(cache_files=[{"filename": str(self.file)}])

    def are_progress_bars_disabled(self) -> bool:
        return not self.bars

    def disable_progress_bars(self) -> None:
        self.bars = False

    def enable_progress_bars(self) -> None:
        self.bars = True


def stand_in(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> Stand:
    monkeypatch.setitem(sys.modules, "datasets", stand)
    return stand


def texts(spelling: str, **settings: Any) -> list[str]:
    return [document.text for document in open_source(spelling, **settings).documents()]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("hub:a/b", HubName("a/b")),
        ("hub:a/b,split=test,config=c-1.0", HubName("a/b", "c-1.0", "test")),
        ("hub:./x y,revision=main", HubName("./x y", revision="main")),
    ],
)
def test_a_spelling_names_a_part_of_a_data_set(spelling: str, name: HubName) -> None:
    assert HubName.parsed(spelling) == name


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("hub:", "names no data set"),
        ("hub:csv", "names no data set"),
        ("hub:a/b/c", "names no data set"),
        ("hub:a/b,splt=x", r"cannot be read at 'splt=x'.*Did you mean 'split'\?"),
        ("hub:a/b,split=train[:9]", r"'split=train\[:9\]'; of a split all rows are taken"),
        ("hub:a/b,split=train+test", "of a split all rows"),
        ("hub:a/b,split=x,split=y", "cannot be read at 'split=y'"),
        ("hub:a/b,split", "cannot be read at 'split'"),
    ],
)
def test_what_is_spelled_otherwise_is_refused(spelling: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hub_files(spelling)


def test_rows_are_those_of_the_files_that_the_library_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table, file = pyarrow.table({"text": ["one", "two"]}), tmp_path / "sums-test.arrow"
    with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table)
    stand = stand_in(monkeypatch, Stand(file))
    source = open_source("hub:a/b,config=c,split=test")
    assert [document.origin for document in source.documents()] == [
        "sums-test.arrow:1",
        "sums-test.arrow:2",
    ]
    assert stand.asked == [
        (("a/b", "c"), {"revision": None}),
        (("a/b", "c"), {"split": "test", "revision": None}),
    ]
    assert stand.bars
    with pytest.raises(InputError, match="leave out include and exclude"):
        open_source("hub:a/b", include=["*.md"])


@pytest.mark.parametrize(
    ("reader", "error", "message"),
    [
        ("pandas", None, "holds pandas, which is not read here"),
        (
            "json",
            ConnectionError("no route.\nat all"),
            r"cannot be reached.* \(no route\. at all\)",
        ),
        ("json", ValueError("Unknown split"), "`datasets` cannot load it: Unknown split"),
        ("json", KeyError(), "`datasets` cannot load it: KeyError"),
    ],
)
def test_what_the_library_says_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, reader: str, error: Exception | None, message: str
) -> None:
    stand_in(monkeypatch, Stand(Path("none"), reader, error))
    with pytest.raises(InputError, match=message) as raised:
        open_source("hub:a/b", field="data.sources.1.path")
    assert raised.value.field == "data.sources.1.path"
    assert "\n" not in str(raised.value)


def test_an_older_library_which_could_run_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = stand_in(monkeypatch, Stand(Path("none")))
    monkeypatch.setattr(stand, "__version__", "3.6.0", raising=False)
    with pytest.raises(InputError, match=r"datasets 3\.6\.0 may run code"):
        hub_files("hub:a/b")
    assert not stand.asked


def test_a_folder_that_has_a_data_sets_name_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, Stand(Path("none")))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"write hub:\./a/b"):
        hub_files("hub:a/b")
    with pytest.raises(InputError, match="there is no such folder"):
        hub_files("hub:./a/c")


def test_configurations_and_splits_of_a_repository(datasets: Any, repository: Path) -> None:
    assert texts(f"hub:{repository},config=easy") == [f"easy/train {n}" for n in range(3)]
    assert texts(f"hub:{repository},config=easy,split=test") == ["easy/test 0"]
    assert texts(f"hub:{repository},config=hard") == ["hard 0", "hard 1"]
    with pytest.raises(InputError, match=r"configs: \['easy', 'hard'\]"):
        open_source(f"hub:{repository}")
    with pytest.raises(InputError, match=r'Unknown split "dev"'):
        open_source(f"hub:{repository},config=easy,split=dev")


def test_code_of_a_data_set_is_never_run(datasets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InputError, match="scripts are no longer supported"):
        open_source(f"hub:{folder}")
    assert not (tmp_path / "ran").exists()


def test_without_network_the_cache_serves(datasets: Any, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be reached, and the data set is not in the cache"):
        open_source("hub:owner/sums,config=easy")
    expected = texts(f"hub:{repository},config=easy")
    # What loading owner/sums from the hub leaves.
    shutil.copytree(tmp_path / "cache" / "sums", tmp_path / "cache" / "owner___sums")
    assert texts("hub:owner/sums,config=easy") == expected
