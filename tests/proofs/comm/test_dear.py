from __future__ import annotations

import shutil
import subprocess

import pytest

from modicum.core.catalog import find
from modicum.proofs import prove
from modicum.proofs.base import Proof, ProofRun
from modicum.proofs.comm.dear import ideal, same_weights
from modicum.proofs.comm.links import shaped

pytestmark = pytest.mark.ranks


def weights(*, null: bool) -> Proof:
    run = ProofRun(find("dear"), null=null, full=False)
    same_weights(run)
    return run.conclude()


def test_the_ideal_is_the_closed_form() -> None:
    overlapped = [3.0 if ratio <= 2 else 1.0 + ratio for ratio in (1, 2, 3, 4, 8)]
    gains = [b / ideal(1.0, ratio) for b, ratio in zip(overlapped, (1, 2, 3, 4, 8), strict=True)]
    assert gains == pytest.approx([1.0, 1.0, 4 / 3.5, 1.25, 9 / 8])


@pytest.mark.dear
def test_weights_are_ddps_and_a_lost_update_is_noticed() -> None:
    assert weights(null=False).verdict == "holds"
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
    (found,) = shaped(4, ["1gbit"], "modicum.proofs.comm.bench:timings", [told])
    formula = 2 * 3 / 4 * 3 * 4 * 100_001
    assert found["sent"]["dear"] / formula == pytest.approx(1.04, abs=0.04)
    assert found["sent"]["ddp"] / formula == pytest.approx(1.04, abs=0.04)
    assert found["sent"]["own"] / formula == pytest.approx(1.56, abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("null", [False, True])
def test_the_proof_of_dear(null: bool) -> None:
    """Of times nothing is asserted here: other tests run beside this one."""
    proof = prove("dear", null=null)
    assert proof.mode == "quick"
    timed = [c for c in proof.criteria if "seconds" in c.sentence or "faster" in c.sentence]
    assert len(timed) == len(proof.criteria) - 1
    assert [c.passed for c in proof.criteria if c not in timed] == [not null]
    if null:
        assert proof.verdict == "does not hold"
