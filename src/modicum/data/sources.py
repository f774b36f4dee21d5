"""Where the text comes from: a file, a folder, or this machine's Python standard library.

A source is a fixed list of files and how to read them; it holds no text. Documents come in one
order, by name, whatever the file system's. Nothing here imports torch or a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Literal

from modicum.core.errors import InputError, clipped
from modicum.core.units import format_bytes
from modicum.data.globs import chosen_by, walk
from modicum.data.kinds import refuse_tables
from modicum.data.readers import Document, opened, opened_text, read_jsonl, read_python, read_text

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
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
_UNREADABLE = (".parquet", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".pkl", ".pdf")
# A single text file is split into pieces so that some of it can be held out for validation; a file
# of a folder stays in one piece unless it is so long that memory would notice.
SINGLE_FILE_PIECE, FOLDER_PIECE = 1 << 16, 1 << 20
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

_LIBRARY = f"the Python {sys.version_info.major}.{sys.version_info.minor} standard library"

FileKind = Literal["text", "python", "jsonl"]
Wrong = Callable[..., InputError]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: where it is, its name in the source (with `/`), how to read it, its bytes."""

    path: Path
    name: str
    kind: FileKind
    size: int


@dataclass(frozen=True)
class Source:
    """A list of files and how to read them; `open_source` makes one.

    Args:
        title: what people call it.
        files: in the order of reading.
        column, prompt_column: of the JSONL files.
        limit_bytes: only the first complete documents of at most so many bytes together.
        piece_bytes: longer text files are read as several documents of about this size.
    """

    title: str
    files: tuple[SourceFile, ...]
    column: str = "text"
    prompt_column: str | None = None
    limit_bytes: int | None = None
    piece_bytes: int = FOLDER_PIECE

    @property
    def total_bytes(self) -> int:
        """Bytes that reading everything takes, for progress: files' sizes, at most the limit."""
        size = sum(file.size for file in self.files)
        return size if self.limit_bytes is None else min(size, self.limit_bytes)

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Every document that is not blank, from number `start` on, read as it is asked for.

        Raises:
            InputError: a file cannot be read as what it is (with file and line), or nothing but
                blank documents is there.
        """
        return islice(self._read(), start, None)

    def _read(self) -> Iterator[Document]:
        done, found = 0, False
        for document in (document for file in self.files for document in self._open(file)):
            done += document.size
            if self.limit_bytes is not None and done > self.limit_bytes:
                if not found:
                    raise InputError(
                        f"the first document ({document.origin}) alone has "
                        f"{document.size} bytes, more than the limit of {self.limit_bytes} bytes",
                        file=self.title,
                    )
                return
            if document.text and not document.text.isspace():
                found = True
                yield document
        if not found:
            raise InputError("there is no text in it: every document is empty", file=self.title)

    def _open(self, file: SourceFile) -> Iterator[Document]:
        if file.kind == "jsonl":
            return read_jsonl(file.path, file.name, self.column, self.prompt_column)
        if file.kind == "python":
            return read_python(file.path, file.name)
        return read_text(file.path, file.name, self.piece_bytes)

    def describe(self) -> str:
        """One phrase for people: what it is, how many files, how many bytes."""
        count = len(self.files)
        text = self.title
        if any(file.kind == "jsonl" for file in self.files):
            prompt = f" after {self.prompt_column!r}" if self.prompt_column else ""
            text += f", column {self.column!r}{prompt}"
        text += f": {count} file{'s' if count != 1 else ''}, {format_bytes(self.total_bytes)}"
        return text + (" (limited)" if self.limit_bytes is not None else "")

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the documents: names, contents, settings."""
        columns = (self.column, self.prompt_column)
        whole = hashlib.sha256(json.dumps([columns, self.limit_bytes, self.piece_bytes]).encode())
        for file in self.files:
            with opened(file.path) as handle:
                contents = hashlib.file_digest(handle, "sha256").hexdigest()
            whole.update(json.dumps([file.name, file.kind, contents]).encode())
        return whole.hexdigest()


@dataclass(frozen=True)
class Inspection:
    """What the first rows of a source hold; `complete` when that was all of it. Sizes in bytes."""

    documents: int
    bytes: int
    longest_bytes: int
    complete: bool


def inspect(source: Source, rows: int = 1000) -> Inspection:
    """Read the first `rows` documents and nothing more.

    Raises:
        InputError: the first problem that is met.
    """
    documents = source.documents()
    sizes = [document.size for document in islice(documents, rows)]
    complete = len(sizes) < rows or next(documents, None) is None
    return Inspection(len(sizes), sum(sizes), max(sizes, default=0), complete)


def open_source(
    path: str | Path | None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    column: str = "text",
    prompt_column: str | None = None,
    limit_bytes: int | None = None,
    recipe_file: str | Path | None = None,
    field: str = "data.path",
) -> Source:
    """The source that `path` names: a file, a folder, or None for the Python standard library.

    Globs are relative to the folder: `*` stays within a name, `**` spans folders, and a folder's
    name takes all that is in it. Without `include`, a folder's JSONL files are taken or, when it
    has none, its text files. Names that start with a dot are left out. `recipe_file` and `field`
    say in messages where `path` was written.

    Raises:
        InputError: nothing is there, nothing matches, or the kind of file cannot be read.

    >>> open_source(None, include=["json/**"]).files[0].name
    'json/__init__.py'
    """
    wrong = partial(InputError, file=recipe_file, field=field)
    if path is None:
        files, title, piece_bytes = (
            _standard_library(include, exclude, wrong),
            _LIBRARY,
            FOLDER_PIECE,
        )
    else:
        root, title = Path(path).expanduser(), str(path)
        if not root.exists():
            raise _nothing_there(root, wrong)
        try:
            if root.is_dir():
                files, piece_bytes = _folder(root, include, exclude, wrong), FOLDER_PIECE
            else:
                files, piece_bytes = (_file(root, wrong),), SINGLE_FILE_PIECE
        except InputError as error:
            raise error.located(field=field) from None
    if prompt_column is not None and any(file.kind != "jsonl" for file in files):
        raise wrong(
            f"text files have no columns, so there is no prompt column {prompt_column!r}; "
            "leave it out or give JSONL",
            value=None if path is None else title,
        )
    return Source(title, files, column, prompt_column, limit_bytes, piece_bytes)


def _source_file(path: Path, name: str, kind: FileKind | None = None) -> SourceFile:
    refuse_tables(path)
    kind = kind or ("jsonl" if path.suffix.lower() in JSONL_SUFFIXES else "text")
    return SourceFile(path, name, kind, path.stat().st_size)


def _file(path: Path, wrong: Wrong) -> SourceFile:
    unreadable = path.suffix.lower() in _UNREADABLE
    if unreadable and path.is_file():
        with opened_text(path):  # says better what it is, where the first bytes do
            pass
    if unreadable or not path.is_file():
        raise wrong(
            f"{path.suffix or 'such'} files cannot be read; convert it to text or JSONL",
            value=str(path),
            allowed="a folder, a UTF-8 text file, or a .jsonl file",
        )
    return _source_file(path, path.name)


def _folder(
    root: Path, include: Sequence[str], exclude: Sequence[str], wrong: Wrong
) -> tuple[SourceFile, ...]:
    there = walk(root)
    chosen = [pair for pair in there if chosen_by(pair[0], include, exclude)]
    if not include:
        lines = [pair for pair in chosen if pair[1].suffix.lower() in JSONL_SUFFIXES[:2]]
        texts = [pair for pair in chosen if pair[1].suffix.lower() in TEXT_SUFFIXES]
        chosen = lines or texts
    if not chosen:
        wanted = f"matches {', '.join(map(repr, include))}" if include else "is JSONL or text"
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


def _standard_library(
    include: Sequence[str], exclude: Sequence[str], wrong: Wrong
) -> tuple[SourceFile, ...]:
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


def _nothing_there(root: Path, wrong: Wrong) -> InputError:
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
