"""`modicum bench link` as ranks run it: one answer, kept and printed by rank 0 alone."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool

from modicum.cli.link_bench import bench_link
from modicum.core.errors import InputError
from modicum.core.machine import links
from modicum.core.machine.links import known_links
from modicum.core.ranks import link_bench
from modicum.core.ranks.ranks import Ranks


def benched(ranks: Ranks, folder: Path, as_json: bool) -> Any:
    measure = link_bench.measure_links
    with (
        patch.object(links, "cache_folder", lambda: folder),
        patch.object(link_bench, "measure_links", lambda joint: measure(joint, (4096, 65_536))),
        redirect_stdout(io.StringIO()) as said,
    ):
        bench_link(None, as_json=as_json)
        ranks.sum(0.0)  # rank 0 has written
        return said.getvalue(), {axis: link.rate for axis, link in known_links().items()}


@pytest.mark.ranks
def test_rank_0_keeps_and_prints_what_all_measured(pool: Pool, tmp_path: Path) -> None:
    (said, known), (nothing, same) = pool.run(benched, tmp_path, True)
    assert nothing == ""
    assert known == same
    found = json.loads(said)
    assert found["links"]["local"]["rate"] == known["local"]
    assert [point["bytes"] for point in found["links"]["local"]["points"]] == [4096, 65_536]
    assert Path(found["file"]).parent == tmp_path
    table = pool.run(benched, tmp_path, False)[0][0]
    assert "Between ranks of one host" in table
    assert "Mb/s" in table


def test_a_rank_does_not_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="is a rank already"):
        bench_link(2, as_json=True)


def test_one_process_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="one rank alone has no link"):
        bench_link(None, as_json=True)
