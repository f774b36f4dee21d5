"""The proof of dense sums: in 16 bits the loss of 32 at half of the bytes; in 32, the same bits.

Two ranks train a small network on scikit-learn's digits, as PowerSGD's proof does. The null sends
32 bits in place of 16: then nothing is saved. Full runs time steps on links of four speeds, too.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.comm.bounded_curve import over_its_bound
from modicum.proofs.distances import worst
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.replicated_training"
RANKS = 2
WIDE: dict[str, Any] = {"method": "dense_sums"}
NARROW: dict[str, Any] = {**WIDE, "dtype": "bf16"}
SCALED: dict[str, Any] = {**WIDE, "dtype": "fp16", "scale": 1024.0}


def prove(run: ProofRun) -> None:
    """Losses and bytes of 16 bits against those of 32, and weights in 32 against plain replicas."""
    run.library("sklearn", "proofs")
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    method = run.contender(NARROW, null=WIDE, null_is="32 bits in place of 16")
    arms = {"fp32": WIDE, "method": method, "fp16": SCALED}
    size = {"steps": 1000 if run.full else 120, "learning_rate": 0.05}
    run.progress("training with each exchange")
    told = {"arms": arms, "size": size, "seeds": list(run.seeds)}
    found = at_ranks(f"{BENCH}:trained", RANKS, told)[0]
    losses = {label: mean(arm["losses"]) for label, arm in found.items()}
    figure = run.figure(
        "held-out loss (nats)", method=losses["method"], baseline=losses["fp32"], claimed="the same"
    )
    each = ratios(found["method"]["losses"], found["fp32"]["losses"])
    run.at_most("loss, of that in 32 bits", figure.ratio, 1.01, seeds=each)
    run.figure("held-out loss in fp16 (nats)", method=losses["fp16"], baseline=losses["fp32"])
    sent = run.figure(
        "bytes that a rank sends in an update",
        method=found["method"]["bytes"],
        baseline=found["fp32"]["bytes"],
        claimed="half",
    )
    run.at_most("bytes, of those in 32 bits", sent.ratio, 0.5)
    off = max(abs(arm["bytes"] - arm["said"]) for arm in found.values())
    run.at_most("bytes by which the ledger is off the meter", off, 0, part="check")
    told = {"arm": WIDE, "size": size | {"steps": 10}}
    apart = worst(at_ranks(f"{BENCH}:bits_apart", RANKS, told))
    run.at_most("a weight in 32 bits, apart from plain replicas'", apart, 0, part="check")
    if run.full:
        is_null = "32 bits in place of 16"
        over_its_bound(run, "dense_bf16", null="dense_fp32", null_is=is_null)
