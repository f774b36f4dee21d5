"""The proof of PowerSGD: the loss of a dense exchange at a small part of its bytes.

Two ranks train a small network on scikit-learn's digits by SGD with momentum; labels are smoothed,
so the loss has a floor above zero, and its ratios mean something. Reduced against the paper: 0.03
in place of 10 to 25 million parameters, two ranks in place of 16. Without error feedback the
method's loss is visibly worse, and that is what the null puts in its place. Full runs time steps on
links of four speeds, too.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.comm.bounded_curve import over_its_bound
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.replicated_training"
RANKS = 2
LOW = {"least_saving": 0.0}
POWERSGD: dict[str, Any] = {"method": "powersgd", "rank": 2, **LOW}
FORGETS: dict[str, Any] = {**POWERSGD, "error_feedback": False}


def prove(run: ProofRun) -> None:
    """Losses with and without error feedback against a dense exchange's, and bytes."""
    run.library("sklearn", "proofs")
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    is_null = "no error feedback"
    method = run.contender(POWERSGD, null=FORGETS, null_is=is_null)
    arms = {"dense": {}, "method": method, "forgets": FORGETS, "as it is": POWERSGD}
    size = {"steps": 1000 if run.full else 200, "learning_rate": 0.05}
    run.progress("training with each exchange")
    told = {"arms": arms, "size": size, "seeds": list(run.seeds)}
    found = at_ranks(f"{BENCH}:trained", RANKS, told)[0]
    losses = {label: mean(arm["losses"]) for label, arm in found.items()}
    figure = run.figure(
        "held-out loss (nats)",
        method=losses["method"],
        baseline=losses["dense"],
        claimed="the test accuracy of SGD",
    )
    each = ratios(found["method"]["losses"], found["dense"]["losses"])
    run.at_most("loss, of the dense exchange's", figure.ratio, 1.03, seeds=each)
    each = ratios(found["forgets"]["losses"], found["method"]["losses"])
    run.at_least("loss without error feedback, of its own", mean(each), 1.05, seeds=each)
    sends(run, found)
    if run.full:
        is_null = "dense sums in its place"
        over_its_bound(run, "powersgd", null="dense_fp32", null_is=is_null)


def sends(run: ProofRun, found: dict[str, Any]) -> None:
    """Bytes and calls of an update, which are those that the ledger says."""
    label = run.contender("as it is", null="dense", null_is="a dense exchange in its place")
    sent = run.figure(
        "bytes that a rank sends in an update",
        method=found[label]["bytes"],
        baseline=found["dense"]["bytes"],
    )
    run.at_most("bytes, of the dense exchange's", sent.ratio, 0.1)
    off = max(abs(arm["bytes"] - arm["said"]) for arm in found.values())
    run.at_most("bytes by which the ledger is off the meter", off, 0, part="check")
    calls = found[label]["calls"] / found[label]["buckets"]
    run.figure("calls a bucket", method=calls, baseline=1, claimed="2")
