"""How well each adapter learns with at most as many trained numbers as a LoRA of rank 4.

In the lab of the proofs (`modicum.proofs.adapters.digits_bench`): a network that knows upright
digits is adapted to 400 turned ones, and the accuracy is on 497 others. Each method has the rate at
which its loss after all steps is lowest, of at least three and none at the edge of its grid, and
5 seeds. The interval is that of the paired difference from LoRA, 95 %, by Student's t. Methods
behind blocks, and LoRAM, whose model is pruned, have no place in this network: their proofs compare
them on models of their own.

    python benchmarks/adapter_quality.py                             # all
    python benchmarks/adapter_quality.py --methods snella diffora    # these; the others stay

LoRA is trained again by the second, and must come to what the file says of it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from common import RESULTS, say, write_result

from modicum.adapters.base import Adapter
from modicum.core.contracts.catalog import catalog
from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.proofs.adapters.digits_bench import STEPS, Curve, DigitsBench
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Swept

RATES = (3e-3, 1e-2, 3e-2)
SEEDS = 5
STUDENT = {2: 12.706, 3: 4.303, 5: 2.776}  # two-sided 95 %, by how many seeds there are
INNER = ("2", "4")  # layers of one shape, which read neurons
# The most numbers that are at most LoRA's, where a method can have so many.
SIZES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "block_lora": {"rank": 4},
    # Only the inner layers are of one kind: they share a pair where the first one has its own.
    "diffora": {"rank": 4, "search_rate": 5e-3},
    "dora": {"rank": 3},
    "flylora": {"rank": 7, "active": 2},
    "hydra": {"rank": 2, "sequential_rank": 1},
    "loldu": {},
    "lora_fa": {"rank": 7},
    "lora_sb": {"rank": 42},
    "lora_xs": {"rank": 42},
    "mos": {"rank": 8, "equivalent_rank": 5, "private_rank": 1, "targets": INNER},
    "pissa": {"rank": 4},
    "q_bara": {"rank": 4},
    "qa_hira": {},
    "randlora": {},
    "rslora": {"rank": 4, "rank_stabilized": True},
    "s2ft": {"neurons": 0.04, "targets": INNER},
    "salt": {"rank": 8},
    "shira": {"rank": 4},
    # Its three scalars a layer would be above; its schedule is for runs of thousands of steps.
    "snella": {"rank": 4, "softmax": False, "every": 10, "falling": 100},
    "soka": {"rank": 4},
    "svfit": {"rank": None},
}
VARIANTS = {"rslora": "lora"}


def best_of(run: ProofRun, name: str) -> Swept[Curve]:
    """A method at its best rate, on layers where it can be."""
    fields = {**SIZES[name]}
    bench = DigitsBench(run, multiplied=True)
    bench.targets = fields.pop("targets", bench.targets)
    value = catalog()[VARIANTS.get(name, name)].load()(**fields)
    assert isinstance(value, Adapter)
    return bench.fastest(value, STEPS, RATES)


def row_of(found: Swept[Curve], lora: Swept[Curve]) -> dict[str, Any]:
    """A method's accuracy and loss, and what its accuracy is above LoRA's."""
    pairs = zip(found.each("accuracy"), lora.each("accuracy"), strict=True)
    above = [one - two for one, two in pairs]
    count = len(above)
    half = STUDENT[count] * statistics.stdev(above) / math.sqrt(count)
    mean = statistics.fmean(above)
    return {
        "trained": int(found.mean("trained")),
        "rate": found.learning_rate,
        "rates": list(found.rates),
        "at_edge": found.learning_rate in (found.rates[0], found.rates[-1]),
        "accuracy": found.mean("accuracy"),
        "accuracies": found.each("accuracy"),
        "loss": found.mean("loss"),
        "over_lora": {"mean": mean, "low": mean - half, "high": mean + half},
    }


def main() -> None:
    """Train all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--seeds", type=int, choices=sorted(STUDENT), default=SEEDS)
    asked = parser.parse_args()
    run = ProofRun(catalog()["lora"], null=False, full=True)
    run.seeds = tuple(range(asked.seeds))
    lora = best_of(run, "lora")
    others = asked.seeds == SEEDS and set(asked.methods) != set(SIZES)
    rows = known_rows(lora) if others else {}
    for name in asked.methods:
        swept = lora if name == "lora" else best_of(run, name)
        row = rows[name] = row_of(swept, lora)
        over = row["over_lora"]
        say(
            f"  {name}: {row['trained']} numbers, accuracy {row['accuracy']:.4f}, over LoRA's "
            f"{over['mean']:+.4f} ({over['low']:+.4f} to {over['high']:+.4f}), rate {row['rate']:g}"
            f"{', at the edge' if row['at_edge'] else ''}"
        )
    settings = {"seeds": asked.seeds, "steps": STEPS, "of": 497}
    if asked.seeds == SEEDS:
        found = {name: rows[name] for name in SIZES if name in rows}
        write_result("adapter_quality", {"methods": found}, settings)


def known_rows(lora: Swept[Curve]) -> dict[str, Any]:
    """What the file says of methods, each with the time at which it was measured.

    Raises:
        InputError: LoRA, with which they were compared, comes to something else now.
    """
    file = RESULTS / "adapter_quality.json"
    before = read_json(file)
    rows: dict[str, Any] = before["methods"]
    if rows["lora"]["accuracies"] != lora.each("accuracy"):
        problem = "LoRA comes to other accuracies now, so measure all methods again"
        raise InputError(problem, file=file)
    return {name: {"when": before["when"]} | row for name, row in rows.items()}


if __name__ == "__main__":
    main()
