"""How the fuzzer spoils things: values, JSON, bytes, tensors' headers, files. Each from a `Random`.

Every function says in a few words what it did, for those who read a find.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 10**9, 10**30, -(10**30), 0.5, 1.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), "", " ", "1", "0.5", "auto", "none", "x" * 300, "x" * 5000, "é",
    "\0", "\ud800", "\u2028", "𝄞", "a\nb", "..", ".", "nowhere", "/dev/zero", "/dev/full",
    "/proc/self/mem", "text.txt", "texts", "new", "~", "~nobody", "-1", "8 gigs", "5m", "1e400",
    [], [[]], {}, {"a": 1}, [None], [1, "a"], {"": ""}, {"method": "lora"}, {"method": None},
    NESTED,
)  # fmt: skip
WORDS = (
    "", " ", "-", "--", "-x", "--json", "--help", "-h", "--out", "--set", "é", "𝄞", "\udcff",
    "x" * 300, "x/" * 3000, "0", "1", "-1", "1.5", "nan", "9" * 26, "nope", ".", "..", "text.txt",
    "texts", "new", "adapted", "new.yaml", "loop", "pipe", "gone", "empty", "/dev/null",
    "/dev/full", "/proc/self", "/proc/nope", "a=b", "training.steps", "training.steps=",
    "training.steps=[", "=", "lora", "adamw", "%s", "$HOME", "'", "a\nb", "~",
)  # fmt: skip


def value(random: Random, old: Any = None) -> Any:
    """Another value, of another type or far away; or one that is near the old one."""
    if isinstance(old, bool) or random.random() < 0.7:
        return random.choice(VALUES)
    if isinstance(old, int | float):
        return random.choice((-old, old + 1, old * 2, old / 2, str(old), [old]))
    if isinstance(old, str):
        return random.choice((old + "x", old[:-1], old.upper(), old * 100, [old], {old: old}))
    return random.choice(VALUES)


def tree(random: Random, root: Any) -> tuple[Any, str]:
    """A copy of plain values with one thing changed somewhere."""
    root = json.loads(json.dumps(root))
    places = list(_places(root))
    if not places:
        return value(random, root), "all of it replaced"
    holder, key = random.choice(places)
    where, old = repr(key), holder[key]
    change = random.choice(("replace", "replace", "replace", "remove", "rename", "add", "swap"))
    if change == "remove":
        del holder[key]
        return root, f"{where} removed"
    if change == "rename" and isinstance(holder, dict):
        name = random.choice((key + "s", key.upper(), "", "é", key[:-1]))
        holder[name] = holder.pop(key)
        return root, f"{where} renamed {name!r}"
    if change == "add" and isinstance(holder, dict):
        holder["unknown"] = value(random)
        return root, f"an unknown key next to {where}"
    if change == "swap":
        other, at = random.choice(places)
        holder[key], other[at] = other[at], old
        return json.loads(json.dumps(root, default=str)) if _finite(
            root
        ) else {}, f"{where} swapped"
    holder[key] = value(random, old)
    return root, f"{where} is {str(holder[key])[:40]!r}"


def _finite(root: Any) -> bool:
    """Whether the values do not hold themselves."""
    try:
        json.dumps(root)
    except (ValueError, RecursionError):
        return False
    return True


def _places(node: Any) -> Any:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if _many(node) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _many(node: Any) -> bool:
    return isinstance(node, list) and len(node) < 50  # a tokenizer's merges are of no interest


def json_bytes(random: Random, raw: bytes) -> tuple[bytes, str]:
    """A JSON text with one value changed, or a key twice."""
    try:
        root = json.loads(raw)
    except ValueError:
        return some_bytes(random, raw)
    if random.random() < 0.1 and isinstance(root, dict) and root:
        key = random.choice(sorted(root))
        twice = f"{{{json.dumps(key)}: {json.dumps(value(random))}, "
        return twice.encode() + raw.lstrip()[1:], f"{key!r} stands there twice"
    root, done = tree(random, root)
    return json.dumps(root).encode(), done


def lines(random: Random, raw: bytes) -> tuple[bytes, str]:
    """JSON lines with one changed."""
    rows = raw.split(b"\n")
    place = random.randrange(len(rows))
    rows[place], done = json_bytes(random, rows[place])
    return b"\n".join(rows), f"line {place + 1}: {done}"


def tensors(random: Random, raw: bytes) -> tuple[bytes, str]:
    """A safetensors file with its header changed, or its numbers."""
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    choice = random.choice(("header", "header", "nan", "length", "dtype", "bytes"))
    if choice == "header":
        header, done = json_bytes(random, header)
    elif choice == "dtype":
        header, done = header.replace(b"F32", random.choice((b"F16", b"I32", b"Q99"))), "dtypes"
    elif choice == "nan":
        data, done = b"\xff" * len(data), "every number is none"
    elif choice == "length":
        size = random.choice((0, 1, length - 1, length + 1, 10**8, 2**63))
        return size.to_bytes(8, "little") + raw[8:], f"a header of {size} bytes"
    else:
        return some_bytes(random, raw)
    return len(header).to_bytes(8, "little") + header + data, done


def _cut(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    return raw[:at], f"truncated at {at} of {len(raw)}"


def _flip(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    changed = bytes([raw[at] ^ (1 << random.randrange(8))]) if raw else b"\0"
    return raw[:at] + changed + raw[at + 1 :], f"a bit at {at}"


def _insert(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    what = random.choice(
        (b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b"\n", b"\t", b'"', b"'", b"\xc3")
    )
    return raw[:at] + what + raw[at:], f"{what!r} put in at {at}"


def _swap(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    size = min(8, len(raw) - max(at, to))
    first, second = min(at, to), max(at, to)
    return (
        raw[:first] + raw[second : second + size] + raw[first + size : second]
        + raw[first : first + size] + raw[second + size :],
        f"bytes at {first} and {second} swapped",
    )  # fmt: skip


def _random(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    return random.randbytes(random.choice((1, 8, 100, 5000))), "random bytes"


def _encode(random: Random, raw: bytes, at: int, to: int) -> tuple[bytes, str]:
    text = raw.decode("utf-8", "replace")
    name = random.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "gzip", "crlf"))
    if name == "gzip":
        return gzip.compress(raw, mtime=0), "compressed"
    if name == "crlf":
        return raw.replace(b"\n", b"\r\n"), "lines end with CR LF"
    return text.encode(name, "replace"), f"in {name}"


_BYTES: tuple[Callable[[Random, bytes, int, int], tuple[bytes, str]], ...] = (
    _cut, _flip, _insert, _swap, _random, _encode,
)  # fmt: skip


def some_bytes(random: Random, raw: bytes) -> tuple[bytes, str]:
    """The bytes with some of them changed."""
    if random.random() < 0.1:
        return b"", "emptied"
    at, to = (int(random.random() * len(raw)) for _ in range(2))
    return random.choice(_BYTES)(random, raw, at, to)


def content(random: Random, path: Path) -> str:
    """Change what a file holds, by what it is; most often so that it stays of its kind."""
    raw = path.read_bytes()
    kinds: dict[str, Callable[[Random, bytes], tuple[bytes, str]]] = {
        ".json": json_bytes,
        ".jsonl": lines,
        ".safetensors": tensors,
    }
    change = kinds.get(path.suffix, some_bytes) if random.random() < 0.75 else some_bytes
    changed, done = change(random, raw)
    path.write_bytes(changed)
    return done


def place(random: Random, path: Path) -> str:
    """Put something else in place of a file or a folder."""
    what = random.choice(
        ("removed", "empty", "folder", "file", "loop", "dangling", "pipe", "closed", "device")
    )
    if what == "closed":
        path.chmod(0)
        return "without permissions"
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if what == "folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif what in ("empty", "file"):
        path.write_text("" if what == "empty" else "something else\n")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "device":
        path.symlink_to("/dev/full")
    elif what == "pipe":
        os.mkfifo(path)
    return f"now {what}"
