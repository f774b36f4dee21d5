"""The proof of MoS: at the parameters of a LoRA of rank 1, its loss is much nearer to the floor.

The paper says how many parameters a LoRA needs for MoS's quality; what can be distinguished from
noise on a small testbed is the reverse, the loss at equal parameters. Each side has its best
learning rate. The full run also asks what the differences between layers are good for: in "pure
sharing" all layers of a kind take the same rows. That is the best simple alternative at equal
parameters.

Reduced: the quick run has a narrower model of 64 symbols, 2 learning rates and 2 seeds where the
full one has the testbed's own size, 3 and 3. A deeper testbed (12 blocks, rank 8), PEFT's VB-LoRA
and VeRA, and the serving of a thousand adapters are not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modicum.adapters import LoRA, MoS
from modicum.adapters.sites import Site
from modicum.proofs.adapters.permutation_bench import PermutationBench, PermutationSize, Tuned
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept

# As hard for its width as the full one: with fewer symbols, rank 1 is nearly enough.
QUICK = PermutationSize(
    64, 24, blocks=4, width=48, mlp_width=128, heads=2, pretraining_steps=600, steps=160
)
# Each side's best lies in these: tried were 1e-2 to 1e-1 for LoRA, and 1e-2 to 6e-2 for MoS, whose
# shards are moved by several layers at once.
LORA_RATES, MOS_RATES = (1e-2, 3e-2, 6e-2), (1e-2, 2e-2, 3e-2)
SHARDED = MoS(rank=4, equivalent_rank=1, private_rank=0, shards=4)
WHOLE_ROWS = MoS(rank=4, equivalent_rank=1, private_rank=0, shards=1)


class PureSharing(MoS):
    """MoS without its four devices: every layer of a kind has the same A and the same B."""

    def index(self, site: Site, sites: Sequence[Site], factor: str, *, seed: int) -> Tensor:
        return torch.arange(self.rank * self.shards)


def prove(run: ProofRun) -> None:
    """Compare with LoRA at equal parameters, and in the full run with what MoS is without parts."""
    testbed = PermutationBench(run, QUICK)
    cut = 0 if run.full else 1
    lora_rates, mos_rates = LORA_RATES[cut:], MOS_RATES[cut:]
    value = run.contender(SHARDED, null=LoRA(rank=1), null_is="LoRA in MoS's place")
    rates = mos_rates if value is SHARDED else lora_rates
    mine, theirs = testbed.best(value, rates), testbed.best(LoRA(rank=1), lora_rates, baseline=True)
    excess, each = _compared(run, "LoRA of rank 1", mine, theirs)
    trained = run.figure(
        "trained parameters",
        method=mine.mean("trained"),
        baseline=theirs.mean("trained"),
        claimed="an eighth at LoRA's quality (LLaMA-2-7B)",
    )
    run.figure("learning rate", method=mine.learning_rate, baseline=theirs.learning_rate)
    bar = 0.6 if run.full else 0.75
    run.at_most("loss above the floor, of LoRA's", excess, bar, seeds=each)
    run.at_most("trained parameters, of LoRA's", trained.ratio, 1.0, part="check")
    if run.full:
        _compared(
            run, "LoRA of rank 2", mine, testbed.best(LoRA(rank=2), lora_rates, baseline=True)
        )
        _ablation(run, testbed)


def _ablation(run: ProofRun, testbed: PermutationBench) -> None:
    """Selection, and with it sharding, each against the same rows for all layers."""
    pure = PureSharing(**WHOLE_ROWS.model_dump())
    shared = testbed.best(pure, MOS_RATES)
    null_is = "pure sharing in place of chosen rows"
    chosen = testbed.best(run.contender(WHOLE_ROWS, null=pure, null_is=null_is), MOS_RATES)
    excess, each = _compared(run, "pure sharing, chosen rows", chosen, shared)
    sentence = "loss above the floor with chosen rows, of pure sharing's"
    run.at_most(sentence, excess, 0.95, part="check", seeds=each)
    null_is = "pure sharing in place of chosen shards"
    chosen = testbed.best(run.contender(SHARDED, null=pure, null_is=null_is), MOS_RATES)
    _, each = _compared(run, "pure sharing, chosen shards", chosen, shared)
    run.against("the same rows for all layers", "loss above the floor at equal parameters", each)


def _compared(
    run: ProofRun, baseline: str, mine: Swept[Tuned], theirs: Swept[Tuned]
) -> tuple[float, list[float]]:
    """Note both sides' held-out losses above the floor; their ratio, and that of each seed."""
    label = f"held-out loss above the floor (nats), against {baseline}"
    figure = run.figure(label, method=mine.mean("excess"), baseline=theirs.mean("excess"))
    return figure.ratio, ratios(mine.each("excess"), theirs.each("excess"))
