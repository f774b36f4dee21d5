"""The bench of links: every axis, the same on all ranks, and a pretended link found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pool import Pool

from modicum.core.ranks import link_bench
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.link_bench import measure_links
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks

SMALL = (4_096, 262_144)


def measured(ranks: Ranks, local: int) -> Any:
    found = measure_links(replace(ranks, local_size=local), SMALL)
    return {
        axis: (link.latency, link.rate, link.cpu, link.ranks, len(points))
        for axis, (link, points) in found.items()
    }


@pytest.mark.ranks
def test_each_axis_has_its_link_and_all_ranks_have_the_slowest_s(pool: Pool) -> None:
    one, hosts = pool.run(measured, 2), pool.run(measured, 2, ranks=4)
    assert set(one[0]) == {"local"}
    assert set(hosts[0]) == {"local", "node"}
    for found in (*one, *hosts):
        for latency, rate, cpu, ranks, points in found.values():
            assert 0 <= latency < 10
            assert rate > 1e4
            assert 0 <= cpu < 1e-3
            assert (ranks, points) == (2, 2)
    assert all(found["node"][:3] == hosts[0]["node"][:3] for found in hosts)


def pretended(ranks: Ranks) -> Any:
    wire = Collectives(ranks, link=Link(rate=4e6, latency=0.02))
    link, _ = link_bench._measured(ranks, wire, SMALL)
    return link.latency, link.rate


@pytest.mark.ranks
def test_a_slow_link_is_found(pool: Pool) -> None:
    """Sleeps are longer on a busy machine, never shorter."""
    for latency, rate in pool.run(pretended):
        assert latency >= 0.019
        assert rate <= 4.4e6
