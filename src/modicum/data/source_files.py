"""Which files a source has: one file, those of a folder, those of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from modicum.core.errors import InputError, clipped
from modicum.data.arrow_rows import UsedColumns
from modicum.data.globs import chosen_by, walk
from modicum.data.hub import hub_files
from modicum.data.opening import opened_text
from modicum.data.row_files import ROW_KINDS, RowKind, bytes_of
from modicum.data.saved_datasets import saved_files
from modicum.data.unpacking import content_name

ROW_SUFFIXES: dict[str, RowKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# What a folder is searched for, in this order; .json is not, since settings are such files too.
_LINES, _TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow"), (".csv", ".tsv")
TEXT_SUFFIXES: tuple[str, ...] = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
)
TEXT_SUFFIXES += (".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh", ".sql", ".html", ".css")
_UNREADABLE = (".xz", ".bz2", ".zip", ".tar", ".pkl", ".pdf")
# What is no source text of the library: other people's packages, tests and their broken samples,
# and files that the build of this machine's Python wrote.
_NOT_LIBRARY: tuple[str, ...] = (
    "site-packages",
    "dist-packages",
    "lib-dynload",
    "test",
    "tests",
    "idle_test",
)
_NOT_LIBRARY += ("config-*", "_sysconfigdata*", "sitecustomize.py", "usercustomize.py")

FileKind = Literal["text", "python"] | RowKind
Wrong = Callable[..., InputError]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: where it is, its name in the source (with `/`), how to read it, its bytes.

    Those of a compressed file are what it unpacks to, about.
    """

    path: Path
    name: str
    kind: FileKind
    size: int

    @property
    def row_kind(self) -> RowKind | None:
        """The kind of its rows; None of text."""
        return self.kind if self.kind in ROW_KINDS else None


def _source_file(path: Path, name: str, kind: FileKind | None = None) -> SourceFile:
    if kind is not None:
        return SourceFile(path, name, kind, path.stat().st_size)
    kind = ROW_SUFFIXES.get(_suffix(path)) or "text"
    if kind in ("parquet", "arrow") and content_name(path) != path:
        raise InputError(f"{kind} files are compressed inside, not outside; unpack it", file=path)
    return SourceFile(path, name, kind, bytes_of(path, kind))


def sized(files: Iterable[SourceFile], used: UsedColumns) -> tuple[SourceFile, ...]:
    """The files with the sizes of what is read of them, where that is some columns."""

    def size(file: SourceFile) -> int:
        return bytes_of(file.path, file.kind, used) if file.kind == "parquet" else file.size

    return tuple(replace(file, size=size(file)) for file in files)


def _suffix(path: Path) -> str:
    """What its content is, by its name: `.jsonl` of `rows.jsonl.gz` too."""
    return content_name(path).suffix.lower()


def one_file(path: Path, wrong: Wrong) -> SourceFile:
    """The file that `path` names.

    Raises:
        InputError: files of its kind are not read.
    """
    unreadable = _suffix(path) in _UNREADABLE
    if unreadable and path.is_file():
        with opened_text(path):  # says better what it is, where the first bytes do
            pass
    if unreadable or not path.is_file():
        raise wrong(
            f"{path.suffix or 'such'} files cannot be read; convert it to text or JSONL",
            value=str(path),
            allowed="a folder, a UTF-8 text file, or a file of rows such as .jsonl or .csv",
        )
    return _source_file(path, path.name)


def folder_files(
    root: Path, include: Sequence[str], exclude: Sequence[str], wrong: Wrong
) -> tuple[SourceFile, ...]:
    """The files of a folder that are meant, in the order of their names.

    Raises:
        InputError: none is.
    """
    there = walk(root)
    chosen = [pair for pair in there if chosen_by(pair[0], include, exclude)]
    if not include and not exclude and (saved := saved_files(root)) is not None:
        chosen = saved
    elif not include:
        chosen = _usual(chosen)
    if not chosen:
        wanted = "is JSONL, text or a table"
        if include:
            wanted = f"matches {', '.join(map(repr, include))}"
        names = ", ".join(repr(name) for name, _ in there[:3])
        raise wrong(
            f"no file in the folder {wanted}"
            + (f" and escapes {', '.join(map(repr, exclude))}" if exclude else "")
            + (f"; it has {len(there)} files, such as {names}" if there else "; it is empty"),
            value=str(root),
            word=include[0] if include else "",
            candidates=_names(there),
        )
    return tuple(_source_file(path, name) for name, path in chosen)


def hub_source_files(spelling: str) -> tuple[SourceFile, ...]:
    """The files of a data set of the hub.

    Raises:
        InputError: it cannot be loaded.
    """
    return tuple(_source_file(path, path.name) for path in hub_files(spelling))


def _usual(there: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """What is read of a folder without patterns: JSONL, Parquet and Arrow, else texts, else tables.

    Tables come before texts that are all about them.
    """

    def having(suffixes: Sequence[str]) -> list[tuple[str, Path]]:
        return [pair for pair in there if _suffix(pair[1]) in suffixes]

    texts, tables = having(TEXT_SUFFIXES), having(_TABLES)
    about = all(content_name(path).stem.lower() in ("readme", "license") for _, path in texts)
    return having(_LINES) or (tables if tables and about else texts)


def library_files(
    include: Sequence[str], exclude: Sequence[str], wrong: Wrong
) -> tuple[SourceFile, ...]:
    """Source files of the Python standard library.

    Raises:
        InputError: the patterns choose none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    there = [
        (name, path)
        for name, path in walk(root, leave_out=_NOT_LIBRARY)
        if name.endswith(".py") and os.access(path, os.R_OK)
    ]
    chosen = [pair for pair in there if chosen_by(pair[0], include, exclude)]
    if not chosen:
        raise wrong(
            f"the Python standard library in {root} has {len(there)} source files, and "
            f"include {clipped(str(list(include)))} with exclude {clipped(str(list(exclude)))} "
            "chooses none of them",
            word=include[0] if include else None,
            candidates=_names(there),
        )
    return tuple(_source_file(path, name, "python") for name, path in chosen)


def _names(there: list[tuple[str, Path]]) -> set[str]:
    """What a glob could have meant: the files, and each folder with all that is in it."""
    files = {name for name, _ in there}
    return files | {f"{folder}/**" for name in files for folder in PurePath(name).parents[:-1]}


def nothing_there(root: Path, wrong: Wrong) -> InputError:
    """The refusal of a path that does not exist, with what is next to where it was expected."""
    missing = root.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    siblings = os.listdir(missing.parent) if missing.parent.is_dir() else []
    return wrong(
        "there is no such file or folder",
        value=str(root),
        word=missing.name,
        candidates=siblings,
    )
