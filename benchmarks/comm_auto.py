"""`comm: auto` against every exchange that it may choose, on links that it has measured.

Two ranks of `modicum train` on a shaped link (pretended where none can be shaped, or asked for),
where a dense all-reduce takes 1, 3 and 10 times what computing takes. The link is measured and
kept as `modicum bench link` does, in a cache of this benchmark's own. Then the same recipe runs
with each exchange and with `auto`: its step over the best single one's, how far the step that its
plan forecast was off, and its loss next to the dense exchange's. `--ratios 1` measures that one
again, and keeps the others of the last result. `--quick` is small and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from comm_recipes import (
    FULL_RUN,
    QUICK_RUN,
    Shape,
    by_itself,
    least_message,
    on_the_wire,
    recipes_of,
    write_data,
)
from common import RESULTS, alone, quiet, say, write_result

from modicum.core.files import user_cache
from modicum.proofs.comm.step_bounds import StepRow as Row
from modicum.proofs.comm.step_bounds import WorldArms as Arms

RATIOS = (1.0, 3.0, 10.0)
OVER_BEST, FORECAST_OFF, LOSS_OFF = 1.1, 0.15, 0.01
PLAIN, AUTO = "plain", "auto"


def ways(recipes: Arms) -> Arms:
    """The recipe with nothing listed, with each single exchange, and with auto among all of them.

    SDP4Bit shards the optimizer's state, which is another recipe.
    """
    plain = {**recipes["dense_fp32"], "comm": None}
    names = ("dense_bf16", "powersgd", "acp_sgd", "dear")
    among = [recipes[name]["comm"] for name in names if name != "dear"]  # which auto tries unasked
    found = {PLAIN: plain, **{name: recipes[name] for name in names}}
    return {**found, AUTO: {**plain, "comm": {"method": AUTO, "among": among}}}


def judged(rows: Mapping[str, Row], none: float, link: Mapping[str, float]) -> Row:
    """Auto's step, forecast and loss at one ratio, and whether each is within its bar.

    Args:
        none: seconds of a step in which nothing travels.
        link: its rate, in bytes a second, and its latency.
    """
    steps = {label: median(row["seconds"]) for label, row in rows.items()}
    best = min((label for label in steps if label != AUTO), key=lambda label: steps[label])
    auto = rows[AUTO]
    off = {
        label: row["forecast"] / steps[label] - 1 for label, row in rows.items() if row["forecast"]
    }
    apart = abs(auto["loss"] / rows[PLAIN]["loss"] - 1)
    return {
        "steps": steps,
        "chosen": auto["chosen"],
        "best": best,
        "over_best": steps[AUTO] / steps[best],
        "over_bound": steps[AUTO] / max(none, on_the_wire(auto, link)),
        "forecast_off": off,
        "loss": {label: row["loss"] for label, row in rows.items()},
        "loss_off": apart,
        "within": {
            "over_best": steps[AUTO] <= OVER_BEST * steps[best],
            "forecast": AUTO in off and abs(off[AUTO]) <= FORECAST_OFF,
            "loss": apart <= LOSS_OFF,
        },
    }


@contextmanager
def own_cache() -> Iterator[None]:
    """A cache with this machine's record, so that the links of others stay as they are."""
    with tempfile.TemporaryDirectory() as name:
        known, own = user_cache("machines"), Path(name) / "modicum" / "machines"
        if known.exists():
            shutil.copytree(known, own)
        for links in own.glob("*.links.json"):
            links.unlink()
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = name
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def at_rate(recipes: Arms, rate: float, shape: Shape) -> tuple[Row, dict[str, float]]:
    """What came of each recipe, and the link, which was measured before."""
    link = shape.on_it(rate, "keeps_link", {})
    return shape.on_it(rate, "trained", {"recipes": recipes}), link


def measured(
    size: Mapping[str, Any],
    steps: int,
    ratios: tuple[float, ...],
    by_port: bool,
    settled: Callable[[], float],
) -> Iterator[Row]:
    """The rows of all ratios so far, after each.

    Args:
        settled: waits until nothing else runs here, and gives the load.
    """
    found: Row = {}
    with tempfile.TemporaryDirectory() as folder, own_cache():
        data = Path(folder) / "text.jsonl"
        write_data(data)
        recipes = recipes_of(data, steps, size)
        settled()
        compute, gradients = by_itself(recipes["dense_fp32"], size["rows"] // 2)
        every = ways(recipes)
        single = {label: recipe for label, recipe in every.items() if label != AUTO}
        message = least_message(single) if by_port else 0
        for ratio in ratios:
            rate = gradients / (ratio * compute)
            load = settled()
            shape = Shape.of(rate, message) if by_port else Shape()
            rows, link = at_rate(every, rate, shape)
            row = {"megabits": rate * 8e-6, "link": link, "load": load, "none": compute}
            found[f"{ratio:g}"] = shape.as_json() | row | judged(rows, compute, link)
            say(f"ratio {ratio:g}: {found[f'{ratio:g}']['over_best']:.2f} of the best single one's")
            yield found


def last_rows() -> Row:
    """The rows of the last result, by ratio."""
    file = RESULTS / "comm_auto.json"
    rows: Row = json.loads(file.read_text(encoding="utf-8"))["ratios"] if file.exists() else {}
    return rows


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small; writes no result")
    parser.add_argument("--pretended", action="store_true", help="shape no link")
    parser.add_argument("--ratios", type=float, nargs="+", choices=RATIOS, help="measure these")
    given = parser.parse_args()
    size, steps = (QUICK_RUN, 10) if given.quick else (FULL_RUN, 24)
    figures: Row = {}
    with alone():
        ratios = tuple(given.ratios or ((3.0,) if given.quick else RATIOS))
        before = last_rows() if given.ratios and not given.quick else {}
        settled = partial(quiet, refuses=not given.quick)
        for new in measured(size, steps, ratios, not given.pretended, settled):
            rows = dict(sorted((before | new).items(), key=lambda row: float(row[0])))
            within = {
                name: all(row["within"][name] for row in rows.values())
                for name in ("over_best", "forecast", "loss")
            }
            figures = {"ratios": rows, "within": within, "complete": len(rows) == len(RATIOS)}
            if not given.quick:  # what has ended stays, should a later ratio fail
                write_result("comm_auto", figures, {"run": FULL_RUN, "steps": steps})
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
