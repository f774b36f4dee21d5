"""Where the text comes from: a file, a folder, or this machine's Python standard library.

A source is a fixed list of files and how to read them; it holds no text. Documents come in one
order, by name, whatever the file system's. Nothing here imports torch or a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from modicum.core.errors import InputError
from modicum.core.units import format_bytes
from modicum.data.chat_template import ChatTemplate, TrainOn
from modicum.data.hub import PREFIX
from modicum.data.hub_stream import HubStream
from modicum.data.opening import opened
from modicum.data.readers import Document, Unmade, read_python, read_rows, read_text
from modicum.data.row_files import rows_of
from modicum.data.row_formats import Format, RowFormat, format_of
from modicum.data.source_files import (
    SourceFile,
    folder_files,
    hub_source_files,
    library_files,
    nothing_there,
    one_file,
    sized,
)

# A single text file is split into pieces so that some of it can be held out for validation; a file
# of a folder stays in one piece unless it is so long that memory would notice.
SINGLE_FILE_PIECE, FOLDER_PIECE = 1 << 16, 1 << 20
_LIBRARY = f"the Python {sys.version_info.major}.{sys.version_info.minor} standard library"


_PEEKED = 1000  # rows of a file


@dataclass(frozen=True)
class Source:
    """A list of files and how to read them; `open_source` makes one.

    Args:
        title: what people call it.
        files: in the order of reading.
        rows: how the rows of files that have some become documents.
        limit_bytes: only the first complete documents of at most so many bytes together.
        piece_bytes: longer text files are read as several documents of about this size.
        hub: where the rows come from instead of files, if they come over the network.
        limit_documents: only the first so many documents.
    """

    title: str
    files: tuple[SourceFile, ...]
    rows: RowFormat = field(default_factory=RowFormat)
    limit_bytes: int | None = None
    piece_bytes: int = FOLDER_PIECE
    hub: HubStream | None = None
    limit_documents: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that reading everything takes, for progress: files' sizes, at most the limit."""
        size = sum(file.size for file in self.files)
        return size if self.limit_bytes is None else min(size, self.limit_bytes)

    @property
    def continuous(self) -> bool:
        """Whether it is running text, which may be split anywhere, and not examples."""
        return self.hub is None and all(file.row_kind is None for file in self.files)

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Every document that is not blank, from number `start` on, read as it is asked for.

        Raises:
            InputError: a file cannot be read as what it is (with file and line), or nothing but
                blank documents is there.
        """
        return islice(self._read(), start, None)

    def _read(self) -> Iterator[Document]:
        found = False
        for document in self.everything():
            if not document.blank:
                found = True
                yield document
        if not found:
            raise InputError("there is no text in it: every document is empty", file=self.title)

    def everything(self) -> Iterator[Document]:
        """Every document within the limit, the blank ones too.

        Raises:
            InputError: a file cannot be read as what it is, or the limit is below the first.
        """
        done = 0
        unmade = (each for number in range(self.parts) for each in self.read(number))
        for document in (each.make() for each in islice(unmade, self.limit_documents)):
            done += document.size
            if self.limit_bytes is not None and done > self.limit_bytes:
                if done == document.size:
                    raise InputError(
                        f"the first document ({document.origin}) alone has "
                        f"{document.size} bytes, more than the limit of {self.limit_bytes} bytes",
                        file=self.title,
                    )
                return
            yield document

    @property
    def parts(self) -> int:
        """How many parts can be read apart: files, or the data set of the hub."""
        return len(self.files) if self.hub is None else 1

    def read(
        self, number: int, skip: int = 0, state: dict[str, Any] | None = None
    ) -> Iterator[Unmade]:
        """The documents of one of the parts, as they are asked for, within no limit.

        Args:
            skip: so many are passed by first.
            state: of a data set of the hub, what the document before gave (`Unmade.state`).

        Raises:
            InputError: the file cannot be read as what it is, with file and line.
        """
        if self.hub is not None:
            found, after = self.hub.opened(skip, state)
            unmade = read_rows(found, None, self.title, self.rows.document)
            return (Unmade(each.size, each.make, after) for each in unmade)
        file = self.files[number]
        if file.row_kind is not None:
            rows = rows_of(file.path, file.row_kind, skip=skip, used=self.rows.used)
            return read_rows(rows, file.path, file.name, self.rows.document)
        if file.kind == "python":
            texts = read_python(file.path, file.name)
        else:
            texts = read_text(file.path, file.name, self.piece_bytes)
        return map(Unmade.of, islice(texts, skip, None))

    def describe(self) -> str:
        """One phrase for people: what it is, how many files, how many bytes."""
        count = len(self.files)
        text = self.title
        if self.hub is not None:
            return f"{text}, {self.rows.describe()}"
        if any(file.row_kind is not None for file in self.files):
            text += f", {self.rows.describe()}"
        text += f": {count} file{'s' if count != 1 else ''}, {format_bytes(self.total_bytes)}"
        return text + (" (limited)" if self.limit_bytes is not None else "")

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the documents: names, contents, settings."""
        rows = self.rows if self._has_tools() else self.rows.without_tools()
        how = [rows.identity, self.limit_bytes, self.piece_bytes]
        whole = hashlib.sha256(json.dumps(how).encode())
        for file in self.files:
            with opened(file.path) as handle:
                contents = hashlib.file_digest(handle, "sha256").hexdigest()
            whole.update(json.dumps([file.name, file.kind, contents]).encode())
        return whole.hexdigest()

    def _has_tools(self) -> bool:
        """Whether first rows come with tools, so that a template for these may write some."""
        if self.rows.template is None or self.rows.template.tool_use is None:
            return False
        every = ((each.path, each.row_kind) for each in self.files)
        read = (islice(rows_of(path, kind), _PEEKED) for path, kind in every if kind is not None)
        return any(row.columns.get("tools") for first in read for row in first)


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
    rows: Format | Literal["auto"] = "auto",
    template: ChatTemplate | None = None,
    train_on: TrainOn = "all",
    limit_bytes: int | None = None,
    streaming: bool = False,
    recipe_file: str | Path | None = None,
    field: str = "data.path",
) -> Source:
    """The source that `path` names: a file, a folder, `hub:OWNER/NAME` for a data set of the hub
    (`HubName`), or None for the Python standard library.

    Globs are relative to the folder: `*` stays within a name, `**` spans folders, and a folder's
    name takes all that is in it. `rows` is the format of the rows; auto: by the columns of the
    first row, unless columns are named; `template` writes conversations, of which `train_on` says
    what is learned. Without `include`, a folder's JSONL files are taken or, when it
    has none, its text files, and its tables when it has nothing else. Names that start with a dot
    are left out. With `streaming` a data set of the hub is not downloaded, but read as it is asked
    for. `recipe_file` and `field` say in messages where `path` was written.

    Raises:
        InputError: nothing is there, nothing matches, or the kind of file cannot be read.

    >>> open_source(None, include=["json/**"]).files[0].name
    'json/__init__.py'
    """
    wrong = partial(InputError, file=recipe_file, field=field)
    hub = HubStream(str(path)) if streaming and str(path).startswith(PREFIX) else None
    files: tuple[SourceFile, ...] = ()
    if path is not None and str(path).startswith(PREFIX):
        if include or exclude:
            problem = "a data set of the hub has splits, not files to choose among by patterns"
            raise wrong(f"{problem}; leave out include and exclude", value=str(path))
        try:
            files, title = () if hub else hub_source_files(str(path)), str(path)
        except InputError as error:
            raise error.located(field=field) from None
        piece_bytes = FOLDER_PIECE
    elif path is None:
        files, title, piece_bytes = (
            library_files(include, exclude, wrong),
            _LIBRARY,
            FOLDER_PIECE,
        )
    else:
        root, title = Path(path).expanduser(), str(path)
        if not root.exists():
            raise nothing_there(root, wrong)
        try:
            if root.is_dir():
                files, piece_bytes = folder_files(root, include, exclude, wrong), FOLDER_PIECE
            else:
                files, piece_bytes = (one_file(root, wrong),), SINGLE_FILE_PIECE
        except InputError as error:
            raise error.located(field=field) from None
    if prompt_column is not None and any(file.row_kind is None for file in files):
        raise wrong(
            f"text files have no columns, so there is no prompt column {prompt_column!r}; "
            "leave it out or give rows, as in JSONL",
            value=None if path is None else title,
        )
    name: Format = "text"
    if rows != "auto":
        name = rows
    elif column == "text" and prompt_column is None:
        try:
            name = _format_in(files, hub)
        except InputError as error:
            raise error.located(field=field) from None
    how = RowFormat(name, template, train_on, column, prompt_column)
    return Source(title, sized(files, how.used), how, limit_bytes, piece_bytes, hub)


def _format_in(files: Sequence[SourceFile], hub: HubStream | None) -> Format:
    """The format of the first row of the first file that has any; text where none has."""
    kinds = ((file.path, file.row_kind) for file in files)
    rows = (row for path, kind in kinds if kind is not None for row in rows_of(path, kind))
    first = next(rows if hub is None else hub.opened()[0], None)
    return "text" if first is None else format_of(first.columns)
