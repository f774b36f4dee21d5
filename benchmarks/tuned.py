"""The table of tuned optimizers: how much less data each needs than AdamW tuned alike.

    python benchmarks/tuned.py      # reads results/proofs: of a method the full one, if it is there

It trains nothing: the figures are those of the optimizers' proofs (`modicum prove NAME --full
--save benchmarks/results/proofs`), each at the best of its own learning rates, and AdamW at several
budgets with rates of its own. A speed-up of 1.3 is the loss for which AdamW needs 1.3 times as much
data; its interval is Student's over seeds. Quick proofs have a third of a token a parameter, full
ones more: between both, figures do not compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from common import RESULTS, say, write_result

WORDS = "tokens for the same loss"


def rows() -> Iterator[dict[str, Any]]:
    """Each arm that was trained next to AdamW, of the full proof if there is one."""
    folder = RESULTS / "proofs"
    names = sorted({file.name.split(".")[0] for file in folder.glob("*.json")})
    for name in names:
        full = folder / f"{name}.full.json"
        file = full if full.is_file() else folder / f"{name}.json"
        proof = json.loads(file.read_text(encoding="utf-8"))
        figures = {each["name"]: each for each in proof["figures"]}
        for words in [each for each in figures if each.endswith(f": {WORDS}")]:
            mean, lower, upper = (
                figures[f"{words}{end}"]["baseline"] / figures[f"{words}{end}"]["method"]
                for end in ("", ", lower end", ", upper end")
            )
            arm = words.removesuffix(f": {WORDS}")
            yield {
                "optimizer": name,
                "arm": arm,
                "proof": proof["mode"],
                "speed_up": mean,
                "lower": lower,
                "upper": upper,
                "loss_over_adamw": figures[f"{arm}: held-out loss (nats)"]["ratio"],
                "seeds": len(proof["seeds"]),
                "measured": proof["when"],
            }


def main() -> None:
    """Read, show and write."""
    found = sorted(rows(), key=lambda row: -row["speed_up"])
    for row in found:
        ends = f"{row['lower']:.2f} to {row['upper']:.2f}"
        say(f"{row['optimizer']}, {row['arm']}: {row['speed_up']:.2f} ({ends}), {row['proof']}")
    less = sorted({row["optimizer"] for row in found if row["lower"] > 1})
    figures = {"rows": found, "less_data": less, "how_many_less": len(less)}
    write_result("tuned", figures, {"over": "AdamW, tuned alike", "interval": 0.95})


if __name__ == "__main__":
    main()
