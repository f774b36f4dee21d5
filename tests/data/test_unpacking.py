from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data import inspect, open_source, opening
from modicum.data.opening import content_bytes

ROWS = [{"text": f"row {number}", "n": number} for number in range(500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def zstandard(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(content)


@pytest.fixture(params=[("gz", gzip.compress), ("zst", zstandard)], ids=["gzip", "zstd"])
def packing(request) -> tuple[str, Callable[[bytes], bytes]]:
    return request.param


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("jsonl", LINES),
        ("json", json.dumps(ROWS)),
        ("csv", "text,n\n" + "".join(f"row {n},{n}\n" for n in range(500))),
        ("txt", LINES),
    ],
)
def test_what_is_packed_is_read_as_it_is_unpacked(tmp_path, packing, suffix, content):
    end, pack = packing
    plain, packed = tmp_path / f"a.{suffix}", tmp_path / "packed" / f"a.{suffix}.{end}"
    plain.write_text(content)
    packed.parent.mkdir()
    packed.write_bytes(pack(content.encode()))
    found = list(open_source(packed).documents())
    assert [(d.text, d.size) for d in found] == [
        (d.text, d.size) for d in open_source(plain).documents()
    ]
    assert found[-1].origin.startswith(f"a.{suffix}.{end}")
    everything = open_source(packed.parent, include=() if suffix != "json" else ["*"])
    assert everything.files[0].name == packed.name
    assert open_source(packed).total_bytes == plain.stat().st_size


def test_first_bytes_say_it_where_the_name_does_not(tmp_path, packing):
    end, pack = packing
    file = tmp_path / "a.jsonl"
    file.write_bytes(pack(LINES.encode()))
    assert inspect(open_source(file)).documents == 500
    named = tmp_path / f"b.jsonl.{end}"
    named.write_text(LINES)
    with pytest.raises(InputError, match=r"b\.jsonl\..*name says .* does not begin so"):
        open_source(named)


def test_several_packed_parts_are_read_one_after_the_other(tmp_path, packing):
    end, pack = packing
    file = tmp_path / f"a.jsonl.{end}"
    file.write_bytes(b"".join(pack(line.encode()) for line in LINES.splitlines(keepends=True)))
    assert inspect(open_source(file)).documents == 500


@pytest.mark.parametrize("missing", [1, 9, 700])
def test_a_truncated_file_is_refused(tmp_path, packing, missing):
    end, pack = packing
    file = tmp_path / f"a.jsonl.{end}"
    file.write_bytes(pack(LINES.encode())[:-missing])
    with pytest.raises(InputError, match=rf"a\.jsonl\.{end}.*truncated") as raised:
        inspect(open_source(file))
    assert "\n" not in str(raised.value)


def test_a_damaged_file_is_refused(tmp_path, packing):
    end, pack = packing
    noise = random.Random(0).randbytes(3000).hex().encode()
    packed = bytearray(pack(noise))
    packed[len(packed) // 2 :] = b"\x55" * (len(packed) - len(packed) // 2)
    file = tmp_path / f"a.txt.{end}"
    file.write_bytes(packed)
    with pytest.raises(InputError, match=rf"a\.txt\.{end}.*(damaged|truncated)"):
        inspect(open_source(file))


def test_what_unpacks_to_very_much_does_not_fill_the_memory(tmp_path, packing, monkeypatch):
    end, pack = packing
    text, lines = tmp_path / f"a.txt.{end}", tmp_path / f"a.jsonl.{end}"
    bomb = pack(b" " * (1 << 25))
    text.write_bytes(bomb)
    lines.write_bytes(bomb)
    monkeypatch.setattr(opening, "LONGEST_ROW", 1 << 20)
    tracemalloc.start()
    try:
        assert sum(document.size for document in open_source(text).everything()) == 1 << 25
        with pytest.raises(InputError, match=r":1: .*the line is longer than"):
            open_source(lines)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_size_is_estimated_by_the_beginning(tmp_path, packing):
    end, pack = packing
    content = random.Random(0).randbytes(1 << 20).hex().encode()
    file = tmp_path / f"a.txt.{end}"
    file.write_bytes(pack(content))
    assert content_bytes(file) == pytest.approx(len(content), rel=0.2)


def test_the_digest_follows_the_content(tmp_path, packing):
    end, pack = packing
    file = tmp_path / f"a.jsonl.{end}"
    file.write_bytes(pack(LINES.encode()))
    before = open_source(file).fingerprint()
    assert open_source(file).fingerprint() == before
    file.write_bytes(pack(LINES.replace("row 7", "row 8").encode()))
    assert open_source(file).fingerprint() != before


def test_without_the_library_the_message_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(InputError, match=r"a\.jsonl\.zst.*pip install 'modicum\[data\]'"):
        open_source(file)
