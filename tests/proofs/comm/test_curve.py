"""The bench of all exchanges: bytes are the ledger's, steps those of a link, links are checked."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from modicum.core.errors import InputError
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.pretended_link import Link, pretending
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.comm.curve_bench import arm_of, coding, curve
from modicum.proofs.comm.links import burst_for, shaped
from modicum.proofs.comm.recipe_bench import trained

LAYER = 4 * 64 * 64
ARMS: dict[str, dict[str, Any]] = {
    "none": {"arm": "none"},
    "ddp": {"arm": "ddp", "bucket_bytes": LAYER},
    "dense": {"arm": "matrix", "method": "dense_sums", "bucket_bytes": LAYER},
    "bf16": {"arm": "matrix", "method": "dense_sums", "dtype": "bf16", "bucket_bytes": LAYER},
    "powersgd": {"arm": "matrix", "method": "powersgd", "rank": 2, "bucket_bytes": 2 * LAYER},
    "acp_sgd": {"arm": "matrix", "method": "acp_sgd", "rank": 2},
    "dear": {"arm": "dear", "layers": 1},
    "sdp4bit": {"arm": "sdp4bit", "bucket_bytes": LAYER},
}
SLEEPING = {"layers": 3, "width": 64, "forward": 0.01, "backward": 0.02, "rows": 0}


def on_a_link(ranks: Ranks, rate: float) -> dict[str, Any]:
    return curve(ranks, arms=ARMS, model=SLEEPING, rate=rate, steps=2, repeats=1)


def codes(ranks: Ranks) -> dict[str, Any]:
    return coding(ranks, arms=ARMS, model=SLEEPING)


def weights_of_two_steps(ranks: Ranks) -> dict[str, list[float]]:
    model = {"layers": 2, "width": 32, "forward": 0.0, "backward": 0.0, "rows": 8}
    found = {}
    for label in ("ddp", "dense", "dear"):
        arm = arm_of(ranks, ARMS[label], model)
        for _ in range(2):
            arm.step()
        arm.strategy.flush()
        found[label] = [float(p.detach().sum()) for p in arm.called.parameters()]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_exchange_sends_what_its_ledger_says(pool: Pool, ranks: int) -> None:
    rate = 1e6
    found = pool.run(on_a_link, rate, ranks=ranks)[0]["arms"]
    metered = {label: row for label, row in found.items() if label not in ("none", "ddp")}
    assert {label: row["bytes"] for label, row in metered.items()} == {
        label: row["said"] for label, row in metered.items()
    }
    assert found["none"]["said"] == found["none"]["bytes"] == 0
    assert found["ddp"]["said"] == 2 * (ranks - 1) * 3 * LAYER // ranks
    assert found["dense"]["calls"] == 3
    assert found["powersgd"]["calls"] == 4  # two buckets, two calls each
    assert found["acp_sgd"]["ring_steps"] == 2 * (ranks - 1)
    assert found["dear"]["ring_steps"] == 2 * 3 * (ranks - 1)
    for row in metered.values():
        # A step is no shorter than its bytes take, where nothing of the next one overlaps.
        assert row["seconds"][0] > 0.9 * min(0.03, row["bytes"] / rate)
    assert found["dense"]["seconds"][0] >= 0.9 * (0.01 + found["dense"]["bytes"] / rate)


@pytest.mark.ranks
def test_the_parts_of_coding_are_timed(pool: Pool) -> None:
    found = pool.run(codes, ranks=2)[0]
    assert set(found) == {"dense", "bf16", "powersgd", "acp_sgd", "sdp4bit"}
    for label in ("powersgd", "acp_sgd"):
        assert 0 < found[label]["encode"] < 1
        assert 0 < found[label]["decode"] < 1


@pytest.mark.ranks
def test_arms_train_alike(pool: Pool) -> None:
    found = pool.run(weights_of_two_steps, ranks=2)[0]
    # PyTorch's DDP takes the mean over the ranks, and the others the sum, of the same gradients.
    assert found["dense"] == pytest.approx(found["dear"], rel=1e-5)
    assert found["dense"] != pytest.approx(found["ddp"], rel=1e-5)


@pytest.mark.ranks
def test_recipes_run_on_a_pretended_link(pool: Pool, tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"the cat saw {n} trees"}) for n in range(60)]
    data.write_text("\n".join(lines) + "\n")
    values: dict[str, Any] = {
        "model": {"layers": 1, "width": 32, "heads": 2, "vocabulary_size": 270},
        "data": {"path": str(data), "column": "text", "sequence_length": 16},
        "training": {"steps": 6, "batch_size": 4, "compile": "none"},
        "parallel": {"strategy": "ddp"},
        "comm": {"method": "dense_sums"},
        "evaluation": {"every": 100, "rows": 2},
        "checkpoint": {"every": 100},
        "samples": {"count": 0},
        "watchdog": None,
    }
    rate = 1e6
    found = pool.run(runs, {"dense": values}, rate, ranks=2)[0]["dense"]
    assert found["bytes"] == found["said"] > 0
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) >= 0.9 * found["bytes"] / rate
    assert found["loss"] > 0


def runs(ranks: Ranks, recipes: dict[str, Any], rate: float) -> dict[str, Any]:
    return trained(ranks, recipes=recipes, rate=rate)


def test_engines_of_a_block_share_a_pretended_link() -> None:
    own, shared = Link(1.0), Link(2.0)
    with pretending(shared):
        first, second = Collectives(Ranks()), Collectives(Ranks(), link=own)
        with pretending(None):
            none = Collectives(Ranks())
    assert (first.link, second.link, none.link) == (shared, own, None)
    assert Collectives(Ranks()).link is None
    assert torch.equal(first.all_reduce(torch.ones(2)).wait(), torch.ones(2))


def test_a_burst_is_small_beside_messages_and_large_enough_for_its_rate() -> None:
    assert burst_for(2.5e6, 64_000) == 3_200
    assert burst_for(2.5e7, 500_000) == 25_000
    with pytest.raises(InputError, match=r"at least 25000 bytes at once"):
        burst_for(2.5e7, 499_000)


@pytest.mark.slow
def test_a_cold_message_takes_what_its_bytes_take() -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
    tools = all(map(shutil.which, ("unshare", "ip", "tc")))
    if not tools or subprocess.run(own, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    rate, message = 2.5e6, 131_072
    cold = "modicum.proofs.comm.links:cold_seconds"
    tell, bursts = [{"message": message}] * 2, [burst_for(rate, message), 131_072]
    right, much = shaped(2, ["20mbit"] * 2, cold, tell, bursts=bursts)
    assert right / (message / rate) == pytest.approx(1, abs=0.15)
    assert much / (message / rate) < 0.5  # what a large burst pretends
