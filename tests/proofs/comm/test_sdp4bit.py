from __future__ import annotations

from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.contracts.method import Against
from modicum.core.ranks.exchange import ExchangeContext, ShardExchange
from modicum.core.ranks.ranks import Ranks
from modicum.proofs import ProofRun
from modicum.proofs.comm import sdp4bit as home
from modicum.proofs.comm.sdp4bit import BENCH, BFLOAT16, DIRECT, HOST, RANKS, SDP4BIT
from modicum.proofs.comm.sharded_training import between_hosts
from modicum.proofs.ranks import at_ranks

pytestmark = pytest.mark.ranks


def test_bytes_between_hosts_are_those_that_leave_one() -> None:
    exchange = ShardExchange(ExchangeContext(Ranks(0, 4, 0, 2)))
    assert between_hosts(exchange) == 0
    assert exchange.nodes.local == HOST["ranks_per_node"]


@pytest.mark.expensive
def test_every_arm_trains_and_counts_its_bytes() -> None:
    arms = {"bf16": BFLOAT16, "method": SDP4BIT, "direct": DIRECT}
    told = {"size": {"steps": 2, "blocks": 1}, "seeds": [0], "arms": arms}
    found = at_ranks(f"{BENCH}:trained", RANKS, told)
    assert len(found) == RANKS
    for rank in found:
        assert {label: arm["losses"] for label, arm in rank.items()} == {
            label: arm["losses"] for label, arm in found[0].items()
        }
        bytes_ = {label: arm["between_hosts"] for label, arm in rank.items()}
        assert 0.25 < bytes_["method"] / bytes_["bf16"] < 0.3  # the rest is the last groups'
        assert bytes_["method"] < bytes_["direct"] < bytes_["bf16"]


@pytest.mark.parametrize("null", [False, True])
def test_both_parts_of_the_verdict_fall_with_the_null(
    null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses and bytes that each exchange would have if all went as the paper has it."""

    def trained(target: str, ranks: int, told: dict[str, Any]) -> list[dict[str, Any]]:
        losses = {label: 3.0 if fields == DIRECT else 1.0 for label, fields in told["arms"].items()}
        sent = {label: 100 if fields == BFLOAT16 else 26 for label, fields in told["arms"].items()}
        return [{k: {"losses": [losses[k]], "between_hosts": sent[k]} for k in losses}] * ranks

    monkeypatch.setattr(home, "at_ranks", trained)
    run = ProofRun(find("sdp4bit"), null=null, full=False)
    home.trains_as_well(run)
    proof = run.conclude()
    assert proof.claim_verdict == ("does not hold" if null else "holds")
    result = "worse" if null else "better"
    assert proof.against == Against(result, "4-bit weights themselves")
    assert proof.defects == ()
