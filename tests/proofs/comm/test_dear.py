from __future__ import annotations

import math
import shutil
import subprocess
from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs import prove
from modicum.proofs.base import ProofRun
from modicum.proofs.comm import dear as module
from modicum.proofs.comm.dear import ideal, same_weights
from modicum.proofs.comm.links import shaped
from modicum.proofs.proof import Proof

pytestmark = pytest.mark.ranks


def weights(*, null: bool) -> Proof:
    run = ProofRun(find("dear"), null=null, full=False)
    same_weights(run)
    return run.conclude()


def test_the_ideal_is_the_closed_form() -> None:
    overlapped = [3.0 if ratio <= 2 else 1.0 + ratio for ratio in (1, 2, 3, 4, 8)]
    gains = [b / ideal(1.0, ratio) for b, ratio in zip(overlapped, (1, 2, 3, 4, 8), strict=True)]
    assert gains == pytest.approx([1.0, 1.0, 4 / 3.5, 1.25, 9 / 8])


@pytest.mark.expensive
def test_weights_are_ddps_and_a_lost_update_is_noticed() -> None:
    assert weights(null=False).claim_verdict == "holds"
    proof = weights(null=True)
    assert not any(criterion.passed for criterion in proof.criteria)
    assert proof.criteria[0].figure > 1e-3


@pytest.mark.slow
def test_gloos_own_reduce_scatter_is_an_all_reduce_on_the_wire() -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
    tools = all(map(shutil.which, ("unshare", "ip", "tc")))
    if not tools or subprocess.run(own, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    arms = {
        "dear": {"layers": 1},
        "own": {"arm": "own reduce-scatter", "layers": 1},
        "ddp": {},
    }
    told = {"arms": arms, "model": {"layers": 3, "elements": 100_000}, "repeats": 1}
    (found,) = shaped(4, ["1gbit"], "modicum.proofs.comm.step_time_bench:timings", [told])
    formula = 2 * 3 / 4 * 3 * 4 * 100_001
    assert found["sent"]["dear"] / formula == pytest.approx(1.04, abs=0.04)
    assert found["sent"]["ddp"] / formula == pytest.approx(1.04, abs=0.04)
    assert found["sent"]["own"] / formula == pytest.approx(1.56, abs=0.08)


@pytest.mark.parametrize("null", [False, True])
def test_each_null_of_dears_proof_would_be_noticed(
    null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seconds that an update would take, were there nothing but sleep and bandwidth."""
    monkeypatch.setattr(module, "at_ranks", computed)
    proof = prove("dear", null=null)
    assert proof.undetected == ()
    assert proof.verdict == ("does not hold" if null else "holds"), proof.reason


def computed(target: str, ranks: int, told: dict[str, Any]) -> list[Any]:
    """What `at_ranks` would return if all went as in the closed forms."""
    function = target.partition(":")[2]
    if function == "distance_from_ddp":
        return [0.0 if told["flush"] else 1e-2] * ranks
    if function == "series":
        return [[timings(ranks, **run) for run in told["runs"]]] * ranks
    return [timings(ranks, **told)] * ranks


def timings(
    ranks: int,
    *,
    arms: dict[str, dict[str, Any]],
    model: dict[str, Any],
    rate: float,
    latency: float = 0.0,
    **_: Any,
) -> dict[str, dict[str, float]]:
    """Seconds and groups of each arm; of all sizes, a tuned one finds the best."""
    layers, size = model["layers"], 4 * model["elements"]
    forward, backward = layers * model["forward"], layers * model["backward"]
    half = (ranks - 1) / ranks * layers * size / rate

    def overlapped(compute: float, exchange: float, groups: int) -> float:
        return max(compute, exchange) + min(compute, exchange) / groups

    def update(groups: int, divided: bool) -> float:
        each = half + groups * (ranks - 1) * latency
        if divided:
            return overlapped(backward, each, groups) + overlapped(forward, each, groups)
        return overlapped(backward, 2 * each, groups) + forward

    seconds, found = {}, {}
    for label, fields in arms.items():
        held = fields.get("layers") or fields.get("bucket_bytes", 25_000_000) // size
        divided = fields.get("arm", label) != "undivided"
        sizes = range(1, layers + 1) if fields.get("tune") else [math.ceil(layers / held)]
        seconds[label], found[label] = min((update(groups, divided), groups) for groups in sizes)
    return {"seconds": seconds, "fastest": seconds, "groups": found}
