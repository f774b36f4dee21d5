"""A stream of a large file: resident memory, by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modicum.data import Tokenizer

PROGRAM = """
import sys
from pathlib import Path
from modicum.core.machine.memory import peak_resident_bytes, resident_bytes
from modicum.core.ranks.ranks import Ranks
from modicum.data import Tokenizer, open_source
from modicum.data.example_table import Placing
from modicum.data.row_stream import RowStream
from modicum.data.stream_block import BlockShape
from modicum.data.stream_reader import StreamReader
from modicum.data.streamed_rows import StreamedRows, StreamSampler

file, tokenizer = sys.argv[1:]
shape = BlockShape(Placing(1024), Tokenizer.load(tokenizer), 300, 1000, True)
rows = StreamedRows([RowStream(StreamReader(open_source(file)), shape, Ranks())])
sampler, step = StreamSampler(rows, 64), 0
sampler.indices(0)
before, trained = resident_bytes(), 0
while not sampler.epoch_of(step):
    indices = sampler.indices(step)
    trained += sum(map(rows.count, indices))
    rows.batch(indices[:4])
    step += 1
print(peak_resident_bytes() - before, trained)
"""


@pytest.mark.slow
def test_a_file_of_300_mb_is_read_in_little_memory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "def area_1(width, height):\n"
    # Most of a row is in a column that is not trained: reading is tried, not the tokenizer.
    line = json.dumps({"text": text, "note": "x" * 3000}) + "\n"
    count = 300_000_000 // len(line)
    with open(tmp_path / "large.jsonl", "w") as file:
        file.writelines(line for _ in range(count))
    tokenizer.save(tmp_path / "tokenizer")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "large.jsonl")]
    done = subprocess.run(
        [*command, str(tmp_path / "tokenizer")], capture_output=True, text=True, check=True
    )
    grown, trained = map(int, done.stdout.split())
    assert trained >= count * len(tokenizer.encode(text))
    assert grown < 60_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.jsonl", "tokenizer"]
