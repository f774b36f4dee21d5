"""The proof of LoRA-XS: LoRA's accuracy with seven times fewer trained numbers.

In the lab (`digits_bench.py`) networks that know upright digits are adapted to turned ones, each
side at the learning rate at which its loss is lowest after all steps. The best simple alternative
of as many trained numbers is a random pair of outer factors. The paper's hundred times fewer are
those of models fifty times wider: r^2 against r' (in + out) at each layer.

Reduced: the quick run has 3 seeds and 3 learning rates where the full one has 10 and 5.
"""

from __future__ import annotations

from modicum.adapters import LoRA, LoRAXS
from modicum.proofs.adapters.digits_bench import RATES, STEPS, DigitsBench
from modicum.proofs.adapters.outer_factors import RANDOM_RATES, LastOuter, RandomOuter
from modicum.proofs.base import ProofRun, ratios

RANK, LORA_RANK = 16, 4
# Its best lies in these: tried were 1e-3 to 8e-1.
XS_RATES = (5e-2, 1e-1, 2e-1, 4e-1, 8e-1)


def prove(run: ProofRun) -> None:
    """Compare with LoRA of seven times the trained numbers, and with random factors."""
    bench = DigitsBench(run)
    run.seeds = tuple(range(10 if run.full else 3))
    asked, null = LoRAXS(rank=RANK), LastOuter(rank=RANK)
    value = run.contender(asked, null=null, null_is="the last singular vectors")
    first, last = (0, 5) if run.full else (1, 4)
    mine = bench.fastest(value, STEPS, (XS_RATES if value is asked else RANDOM_RATES)[first:last])
    lora_rates = RATES if run.full else RATES[2:]
    lora = bench.fastest(LoRA(rank=LORA_RANK), STEPS, lora_rates, baseline=True)
    drawn = bench.fastest(RandomOuter(rank=RANK, std=0.0), STEPS, RANDOM_RATES[first:last])
    for name, other in (("LoRA", lora), ("random factors", drawn)):
        for figure in ("accuracy", "loss", "trained"):
            run.figure(
                f"{figure}, against {name}", method=mine.mean(figure), baseline=other.mean(figure)
            )
    fewer = lora.mean("trained") / mine.mean("trained")
    run.at_least("LoRA's trained numbers over its own", fewer, 7.0, part="check")
    pairs = zip(mine.each("accuracy"), lora.each("accuracy"), strict=True)
    above = [one - two for one, two in pairs]
    mean = sum(above) / len(above)
    run.at_least("test accuracy over LoRA's of rank 4", mean, 0.0, seeds=above)
    errors = ratios(mine.each("error"), drawn.each("error"))
    run.against("random orthonormal factors", "test errors after all steps", errors)
