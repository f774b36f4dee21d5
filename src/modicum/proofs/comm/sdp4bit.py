"""The proof of SDP4Bit: the loss of bfloat16 exchanges at a quarter of their bytes.

Four ranks as two hosts of two. The baseline sends bfloat16 weights around a ring and bfloat16
gradients in two hops, so that as few bytes as can be leave a host. The best simple alternative in
as few bits is to quantize the weights themselves; here its gradients keep 16 bits.

Quick: a decoder of 0.05 million parameters, one seed, and a link that is pretended (bytes are
real and go over the loopback; the rest of the time is slept).

Full: all arms of the specification, three seeds, and a real link between two hosts, made of network
namespaces. Reduced against it: 0.6 in place of 5 to 10 million parameters, 200 in place of 500
to 1,000 steps, a generated source of known entropy in place of text; where time is measured compute
is slept, and the link has 10 Mb/s in place of 100 to 200, as two CPU cores code for four ranks.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.comm.bounded_curve import over_its_bound
from modicum.proofs.comm.links import burst_for, in_tc, shaped
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.sharded_training"
RANKS, HOST = 4, {"ranks_per_node": 2}
EXACT_WEIGHTS = {"weight_bits": 32}
HALF_GRADIENTS = {"gradient_bits": 16, "inner_bits": 16, "hadamard": False}
BFLOAT16 = {**HOST, **EXACT_WEIGHTS, **HALF_GRADIENTS}
SDP4BIT = {**HOST}
DIRECT = {**HOST, **HALF_GRADIENTS, "direct": True}
# The parts of the method, and others' ways.
PARTS: dict[str, dict[str, Any]] = {
    "4-bit gradients in both hops, no transform (ZeRO++)": {
        **HOST, **EXACT_WEIGHTS, "inner_bits": 4, "hadamard": False
    },
    "weight differences alone (qWD)": {**HOST, **HALF_GRADIENTS},
    "two hops, no transform (TLq)": {**HOST, **EXACT_WEIGHTS, "hadamard": False},
    "two hops with the transform (TLq-HS)": {**HOST, **EXACT_WEIGHTS},
}  # fmt: skip
FULL = {"symbols": 48, "tokens": 32, "blocks": 3, "width": 128, "rows": 16, "steps": 200}


def prove(run: ProofRun) -> None:
    """Train all arms, count their bytes, and time them on a link that is slow."""
    trains_as_well(run)
    sends_less(run)
    if run.full:
        over_its_bound(run, "sdp4bit", null="dense_fp32", null_is="dense sums in its place")


def trains_as_well(run: ProofRun) -> None:
    """The loss of bfloat16 exchanges, which weights quantized themselves do not reach."""
    run.seeds = (0, 1, 2) if run.full else (0,)
    method = run.contender(SDP4BIT, null=DIRECT, null_is="weights quantized, not their differences")
    arms = {"bf16": BFLOAT16, "method": method, "direct": SDP4BIT if run.null else DIRECT}
    size = FULL if run.full else {}
    told = {"size": size, "seeds": list(run.seeds), "arms": arms | (PARTS if run.full else {})}
    run.progress("training with each exchange")
    found = at_ranks(f"{BENCH}:trained", RANKS, told)[0]
    each = {label: list(arm["losses"]) for label, arm in found.items()}
    losses = {label: mean(ends) for label, ends in each.items()}
    loss = run.figure(
        "held-out loss (nats)",
        method=losses["method"],
        baseline=losses["bf16"],
        claimed="that of bfloat16 (GPT of 125M to 6.7B)",
    )
    over_exact = ratios(each["method"], each["bf16"])
    run.at_most("loss, of bfloat16's", loss.ratio, 1.01, seeds=over_exact)
    for label in PARTS if run.full else ():
        run.figure(f"loss: {label}", method=losses[label], baseline=losses["bf16"])
    # Named anew, as in the null it is the differences that stand in this place.
    run.contender(DIRECT, null=SDP4BIT, null_is="differences where weights should be quantized")
    run.figure("loss: 4-bit weights themselves", method=losses["direct"], baseline=losses["bf16"])
    over_direct = ratios(each["method"], each["direct"])
    run.against("4-bit weights themselves", "held-out loss at no more bytes", over_direct)
    run.contender(SDP4BIT, null=BFLOAT16, null_is="bfloat16 in the method's place")
    sent = run.figure(
        "bytes between hosts an update",
        method=found["bf16" if run.null else "method"]["between_hosts"],
        baseline=found["bf16"]["between_hosts"],
        claimed="nearly 4 bits an element",
    )
    run.at_most("bytes between hosts, of bfloat16's", sent.ratio, 0.27)


def sends_less(run: ProofRun) -> None:
    """Time of a step where the baseline's exchange takes four times what computing takes."""
    method = run.contender(SDP4BIT, null=BFLOAT16, null_is="bfloat16 in the method's place")
    arms = {"bf16": BFLOAT16, "method": method}
    elements = 2_097_152 if run.full else 262_144
    # 3/4 of the weights leave a host around the ring, and half of the gradients from each rank.
    carried = 2 * (3 / 4 + 2 / 4) * elements
    asked = {"arms": arms, "elements": elements, "coded": SDP4BIT}
    run.progress("steps on a slow link")
    run.quiet()
    if run.full:
        rate = 10e6 / 8
        told = {**asked, "compute": carried / rate / 4}
        # The shortest message is a quarter of the gradients in 4 bits.
        bursts = [burst_for(rate, elements // 8)]
        (found,) = shaped(RANKS, [in_tc(rate)], f"{BENCH}:timed", [told], local=2, bursts=bursts)
        sent = found["sent"]
        run.figure(
            "bytes that a host's device sends in a step",
            method=sent["method"],
            baseline=sent["bf16"],
        )
    else:
        told = {**asked, "compute": 0.15, "rate": carried / 0.6}
        found = at_ranks(f"{BENCH}:timed", RANKS, told)[0]
    seconds = found["fastest"]
    figure = run.figure(
        "seconds of a step, an exchange of 4 computations",
        method=seconds["method"],
        baseline=seconds["bf16"],
        claimed="4.08 times faster (128 GPUs)",
    )
    run.at_least("times faster than bfloat16", 1 / figure.ratio, 2.0 if run.full else 1.5)
    coding = found["coding"]
    run.figure(
        "milliseconds to code and decode a million elements, gradients next to weights",
        method=1000 * coding["gradients"],
        baseline=1000 * coding["weights"],
    )
