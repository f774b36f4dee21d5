"""What proofs of optimizers near AdamW share: no worse than it by two deviations of its seeds."""

from __future__ import annotations

from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.data_speed_up import ADAMW, AgainstAdamW, TunedArm
from modicum.proofs.optim.text_bench import Plain

RATES = (1e-3, 2e-3, 4e-3)
APART_RATES = (4e-3, 8e-3, 16e-3)  # where matrices have a quarter of it, as AdamW may have too
DEVIATIONS = 2.0


def as_good_as_adamw(run: ProofRun, name: str, value: OptimizerMethod, *, claimed: str) -> None:
    """The data speed-up over tuned AdamW with its interval, and the loss at equal tokens.

    The bar is on the mean loss over seeds of the same batches: at most AdamW's and two deviations
    of AdamW's over the seeds. A null puts AdamW with half of the tokens in the method's place.
    """
    bench = AgainstAdamW(run)
    arms: list[TunedArm] = [(name, Plain(value), RATES)]
    if run.full:
        arms.append((f"{name}, matrices a quarter", Plain(value, 0.25), APART_RATES))
    chosen, has = run.contender(
        (arms, 1.0),
        null=([("AdamW", Plain(ADAMW), ())], 0.5),
        null_is="AdamW with half of the tokens in its place",
    )
    found = bench.speed_up(name, chosen, claimed=claimed, adamw_has=has)
    run.at_most(
        "held-out loss above AdamW's, in deviations of AdamW's seeds",
        found.above,
        DEVIATIONS,
    )
    run.against("AdamW, tuned alike", "held-out loss at equal tokens", found.losses)
