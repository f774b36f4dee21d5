"""The curves of the page on classes of texts, from the result of `benchmarks/text_classes.py`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "text_classes.json"
PAGE = "how-to/classify-texts.md"
PICTURE = "assets/class-curves.svg"
TITLES = {
    "full": "full",
    "lora": "LoRA",
    "frozen_vectors": "regression on frozen mean vectors",
    "token_counts": "regression on counts of tokens",
}
SHOWN = (
    "![Accuracy after updates, of full training and of LoRA, with the range of their seeds, next "
    f"to that of both regressions](../{PICTURE})"
)


def shown(markdown: str) -> str:
    """The page with its picture, where it says how that is made."""
    return re.sub("<!-- picture -->.*<!-- picture: end -->", SHOWN, markdown, flags=re.DOTALL)


def picture() -> str:
    """Accuracy over updates, as SVG: means and ranges of seeds, and the regressions as levels."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(9, 5))
    for place, (name, runs) in enumerate(found["curves"].items()):
        evaluations = list(zip(*runs, strict=True))  # one row of each seed
        steps = [rows[0]["step"] for rows in evaluations]
        shares = [[100 * row["accuracy"] for row in rows] for rows in evaluations]
        color = f"C{place}"
        axes.plot(steps, [*map(fmean, shares)], "o-", color=color, label=TITLES[name])
        axes.fill_between(steps, [*map(min, shares)], [*map(max, shares)], color=color, alpha=0.2)
    for place, (name, reached) in enumerate(found["baselines"].items(), len(found["curves"])):
        level = 100 * reached["accuracy"]
        axes.axhline(level, color=f"C{place}", linestyle="--", label=TITLES[name])
    axes.set_xlabel("updates")
    axes.set_ylabel("accuracy, %")
    axes.legend(loc="lower right")
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    plt.close(figure)
    return drawn.getvalue()
