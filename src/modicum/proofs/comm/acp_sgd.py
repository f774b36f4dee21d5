"""The proof of ACP-SGD: the loss of dense exchanges and of PowerSGD, at half of PowerSGD's bytes.

Two ranks train a small network on scikit-learn's digits by SGD with momentum; labels are smoothed,
so the loss has a floor above zero. The best simple alternative is PowerSGD of half the rank, which
sends as much. Reduced against the paper: 0.03 in place of 25 to 336 million parameters, two ranks
in place of 8 to 64.

Quick: seconds of a step are of two ranks on one machine, whose link is pretended: bytes go over the
loopback, and the rest of the time is slept. They stand as figures, without a bar.

Full: steps of four ranks whose layers sleep, on links of four speeds, against their bound and
PowerSGD's (`modicum.proofs.comm.bounded_curve`).
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.comm.bounded_curve import at_ratio, over_its_bound
from modicum.proofs.comm.powersgd import BENCH, LOW, RANKS
from modicum.proofs.ranks import at_ranks

ACP: dict[str, Any] = {"method": "acp_sgd", "rank": 2, **LOW}
FORGETS: dict[str, Any] = {**ACP, "error_feedback": False}
POWERSGD: dict[str, Any] = {"method": "powersgd", "rank": 2, **LOW}
AS_MUCH: dict[str, Any] = {**POWERSGD, "rank": 1}
# Of a step on a slow link: a dense exchange takes 0.4 seconds.
WIDTH, LAYERS, RATE = 256, 4, 2.6e6
# Where PowerSGD's bytes take so much of computing, its step must take so much of ACP-SGD's.
FROM, FASTER = 0.3, 1.2


def prove(run: ProofRun) -> None:
    """Losses, bytes and calls, and seconds."""
    run.library("sklearn", "proofs")
    trains_as_well(run)
    if run.full:
        steps_on_links(run)
    else:
        steps_on_a_slow_link(run)


def trains_as_well(run: ProofRun) -> None:
    """The loss of both others; it is worse where nothing is owed."""
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    method = run.contender(ACP, null=FORGETS, null_is="no error feedback")
    arms = {
        "dense": {},
        "method": method,
        "forgets": FORGETS,
        "as it is": ACP,
        "powersgd": POWERSGD,
        "as much": AS_MUCH,
    }
    size = {"steps": 1000 if run.full else 200, "learning_rate": 0.05}
    run.progress("training with each exchange")
    told = {"arms": arms, "size": size, "seeds": list(run.seeds)}
    found = at_ranks(f"{BENCH}:trained", RANKS, told)[0]
    own = found["method"]["losses"]
    for label, name in (("dense", "the dense exchange"), ("powersgd", "PowerSGD")):
        each = ratios(own, found[label]["losses"])
        theirs = mean(found[label]["losses"])
        run.figure(f"held-out loss (nats), next to {name}", method=mean(own), baseline=theirs)
        run.at_most(f"loss, of that of {name}", mean(each), 1.03, seeds=each)
    each = ratios(found["forgets"]["losses"], own)
    run.at_least("loss without error feedback, of its own", mean(each), 1.05, seeds=each)
    each = ratios(own, found["as much"]["losses"])
    run.against("PowerSGD of as many bytes", "held-out loss", each)
    sends(run, found)


def sends(run: ProofRun, found: dict[str, Any]) -> None:
    """Bytes and calls of an update, which are those that the ledger says."""
    label = run.contender("as it is", null="powersgd", null_is="PowerSGD in its place")
    sent = run.figure(
        "bytes that a rank sends in an update",
        method=found[label]["bytes"],
        baseline=found["powersgd"]["bytes"],
        claimed="half of PowerSGD's factors",
    )
    run.at_most("bytes, of PowerSGD's", sent.ratio, 0.65)
    off = max(abs(arm["bytes"] - arm["said"]) for arm in found.values())
    run.at_most("bytes by which the ledger is off the meter", off, 0, part="check")
    calls = found[label]["calls"] / found[label]["buckets"]
    run.at_most("calls a bucket", calls, 1)


def steps_on_links(run: ProofRun) -> None:
    """Steps over their bound, and PowerSGD's over them where its bytes take long enough."""
    is_null = "dense sums in its place"
    points = over_its_bound(
        run, "acp_sgd", null="dense_fp32", null_is=is_null, rivals=("powersgd",)
    )
    label = run.contender("acp_sgd", null="powersgd", null_is="PowerSGD in its place")
    for ratio, point in points.items():
        theirs = point["arms"]["powersgd"]
        if theirs["wire"] >= FROM * point["none"]:
            sentence = f"{at_ratio(ratio, point)}: times faster than PowerSGD"
            run.at_least(sentence, theirs["step"] / point["arms"][label]["step"], FASTER)


def steps_on_a_slow_link(run: ProofRun) -> None:
    """Seconds of a step where a dense exchange takes many times what computing takes."""
    arms = {
        "dense": {},
        "method": {"method": "acp_sgd", "rank": 4},
        "powersgd": {"method": "powersgd", "rank": 4},
    }
    told = {"arms": arms, "width": WIDTH, "layers": LAYERS, "rate": RATE, "steps": 4}
    run.progress("steps on a slow link")
    seconds = at_ranks(f"{BENCH}:timed", RANKS, told)[0]
    for label, claimed in (("dense", "4.06 times faster"), ("powersgd", "1.43 times faster")):
        run.figure(
            f"seconds of a step on a slow link, next to {label}",
            method=seconds["method"],
            baseline=seconds[label],
            claimed=f"{claimed} (8 to 64 GPUs)",
        )
