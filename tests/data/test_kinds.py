from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data.sources import inspect, open_source

TEXT = "One line, and another.\n" * 200


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return made.getvalue()


KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "utf-16": (lambda: TEXT.encode("utf-16"), "UTF-16 text, and UTF-8.*iconv -f utf-16 -t"),
    "utf-16-be": (lambda: b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16 text"),
    "utf-16 unmarked": (lambda: TEXT.encode("utf-16-le"), "without a byte order mark"),
    "utf-32": (lambda: TEXT.encode("utf-32"), "iconv -f utf-32"),
    "gzip twice": (lambda: gzip.compress(gzip.compress(TEXT.encode())), "gzip twice.*gunzip"),
    "bzip2": (lambda: bz2.compress(TEXT.encode()), "bzip2"),
    "xz": (lambda: lzma.compress(TEXT.encode()), "xz"),
    "zip": (_zip, "ZIP"),
    "tar": (_tar, "tar -xf"),
    "packed tar": (lambda: gzip.compress(_tar()), "tar -xf"),
    "parquet": (lambda: b"PAR1" + bytes(20), r"Parquet.*suffix \.parquet"),
    "pdf": (lambda: b"%PDF-1.7\n" + TEXT.encode(), "pdftotext"),
    "pickle": (lambda: b"\x80\x04\x95" + bytes(20), "never read"),
    "pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\noid x\n", "git lfs pull"),
}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_named_with_what_to_do(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    make, told = KINDS[kind]
    (tmp_path / f"data{suffix}").write_bytes(make())
    for path in (tmp_path, tmp_path / f"data{suffix}"):
        with pytest.raises(InputError, match=told) as raised:
            inspect(open_source(path))
        assert "latin1" not in str(raised.value)


def test_a_name_that_says_so_gets_the_better_message_of_the_two(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl.bz2"
    file.write_bytes(bz2.compress(b"{}"))
    with pytest.raises(InputError, match="bunzip2"):
        open_source(file)
    file.write_bytes(b"plain")
    with pytest.raises(InputError, match=r"\.bz2 files cannot be read"):
        open_source(file)


@pytest.mark.parametrize("text", ["\ufeffmarked", "a\0b" * 9, "BZh is a word", "x" * 5000, "ÿþ"])
def test_text_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.txt").write_text(text, encoding="utf-8")
    assert inspect(open_source(tmp_path)).documents == 1
