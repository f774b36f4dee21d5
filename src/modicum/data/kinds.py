"""What a file is by its first bytes, where it is no UTF-8 text, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from modicum.core.errors import InputError

HEAD = 4096  # bytes that are looked at
_CONVERT = "convert it to JSONL, with the text in one column"
_UTF16 = "convert it to UTF-8, for instance with `iconv -f utf-16 -t utf-8 FILE > NEW`"
# How the file begins: what it is, what to do. The longer of two that begin alike stands first.
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (b"\xff\xfe\0\0", "UTF-32 text", _UTF16.replace("16", "32")),
    (b"\0\0\xfe\xff", "UTF-32 text", _UTF16.replace("16", "32")),
    (b"\xff\xfe", "UTF-16 text", _UTF16),
    (b"\xfe\xff", "UTF-16 text", _UTF16),
    (b"\x1f\x8b", "compressed with gzip twice", "unpack it first (`gunzip FILE`)"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard twice", "unpack it first (`zstd -d FILE`)"),
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it first (`unxz FILE`)"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", "unpack it first (`lz4 -d FILE`)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it first (`7z x FILE`)"),
    (b"PK\x03\x04", "a ZIP archive or an Office document", "unpack it, or save it as text"),
    (b"\xd0\xcf\x11\xe0", "an old Office document", "save it as text"),
    (b"{\\rtf", "a document in Rich Text Format", "save it as text"),
    (b"%PDF-", "a PDF document", "take its text out, for instance with `pdftotext FILE`"),
    (b"PAR1", "a Parquet file", "give it the suffix .parquet"),
    (b"ARROW1", "an Arrow file", "give it the suffix .arrow"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "give it the suffix .arrow"),
    (b"FEA1", "a Feather file", _CONVERT),
    (b"Obj\x01", "an Avro file", _CONVERT),
    (b"\x89HDF\r\n", "an HDF5 file", _CONVERT),
    (b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (b"\x93NUMPY", "a NumPy array", "give the text that it was made from"),
    (b"\x80\x02", "a pickle, which is never read here", _CONVERT),
    (b"\x80\x03", "a pickle, which is never read here", _CONVERT),
    (b"\x80\x04", "a pickle, which is never read here", _CONVERT),
    (b"\x80\x05", "a pickle, which is never read here", _CONVERT),
    (b"\x89PNG\r\n", "an image", "a task of images reads those"),
    (b"\xff\xd8\xff", "an image", "a task of images reads those"),
    (b"\x7fELF", "a program", "give text"),
    (
        b"version https://git-lfs.github.com/",
        "a Git LFS pointer, not the file itself",
        "run `git lfs pull` in its folder",
    ),
)


def refuse_other_kinds(path: Path, head: bytes) -> None:
    """Refuse a file that begins as no UTF-8 text of ours does; `head` is its first `HEAD` bytes.

    Raises:
        InputError: with what it is, and what to do.
    """
    found = next(((what, do) for begin, what, do in _BEGINNINGS if head.startswith(begin)), None)
    if found is None and head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        found = ("compressed with bzip2", "unpack it first (`bunzip2 FILE`)")
    elif found is None and head[257:262] == b"ustar":
        found = ("a tar archive", "unpack it first (`tar -xf FILE`)")
    elif found is None and _is_utf16(head):
        # Each zero byte is a letter of UTF-8 too: without this it would be trained as text.
        found = ("UTF-16 text without a byte order mark", _UTF16.replace("utf-16", "utf-16le"))
    if found is not None:
        what, do = found
        raise InputError(f"the file is {what}, and UTF-8 text is read; {do}", file=path)


def _is_utf16(head: bytes) -> bool:
    """Whether every other byte is mostly zero, as in UTF-16 of any text in Latin letters."""
    half = len(head) // 2
    counts = sorted((head[0::2].count(0), head[1::2].count(0)))
    return half >= 4 and counts[1] > 0.7 * half and counts[0] < 0.1 * half
