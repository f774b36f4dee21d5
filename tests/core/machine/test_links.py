"""Links between ranks: fitted to what calls took, kept by axis, damaged files left alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.machine import links
from modicum.core.machine.links import MeasuredLink, fitted, keep_links, known_links, link_of
from modicum.core.ranks.link_bench import measure_links
from modicum.core.ranks.ranks import Ranks


def test_a_link_is_found_again_in_what_its_calls_took() -> None:
    link, sent = MeasuredLink(3e-4, 5e7), [4096, 65_536, 524_288, 8_388_608]
    latency, rate = fitted(sent, 2, [link.seconds(each, 2) for each in sent])
    assert latency == pytest.approx(3e-4, rel=1e-4)
    assert rate == pytest.approx(5e7, rel=1e-4)


@given(st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=5))
def test_whatever_was_measured_can_be_read_again(seconds: list[float]) -> None:
    latency, rate = fitted([4096 << n for n in range(len(seconds))], 2, seconds)
    link = MeasuredLink(latency, rate)
    assert link_of(asdict(link)) == link


def test_neither_is_negative_whatever_was_measured() -> None:
    latency, rate = fitted([10, 1000], 2, [0.001, 0.0005])  # the more, the faster: noise
    assert 2 * latency == pytest.approx(1000 / rate, rel=1e-5)
    assert 0.0005 < 2 * latency < 0.001
    latency, rate = fitted([1000, 4000], 2, [0.0005, 0.006])
    assert latency == 0.0
    assert 0 < rate < 1e7


def test_what_is_kept_is_read_again_by_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "cache_folder", lambda: tmp_path / "machines")
    assert known_links() == {}
    near, far = MeasuredLink(1e-4, 2e9, 1e-9, 2, "now"), MeasuredLink(1e-3, 1e7, 2e-9, 4, "then")
    keep_links({"local": near})
    file = keep_links({"node": far})
    assert known_links() == {"local": near, "node": far}
    file.write_text(
        json.dumps({"local": {"latency": -1}, "node": json.loads(file.read_text())["node"]})
    )
    assert known_links() == {"node": far}
    file.write_text("[1, 2")
    assert known_links() == {}


def test_one_rank_alone_has_no_link() -> None:
    with pytest.raises(InputError, match="one rank alone has no link"):
        measure_links(Ranks())


@pytest.mark.parametrize("held", ["null", "[1]", "5", '{"local": {"latency": 0, "rate": 1}}'])
def test_a_file_of_something_else_holds_no_link(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "cache_folder", lambda: tmp_path)
    links.links_file().write_text(held, encoding="utf-8")
    assert known_links() == {}
