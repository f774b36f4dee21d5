"""Every adapter's step and saved bytes next to peft's, on one transformers Llama of 34 M numbers.

Copies with ours and with peft's take turns with the frozen model in one run, in fp32, on all
linears, with AdamW; ratios are of the same round. A step over the frozen one stands next to the
ratio of matrix-product work that the adapter's ledger says; beyond that the operations are named
that take more. Saved bytes are counted by unique storage, next to what the equations need.

Parts and methods can be run apart: what was measured at the same settings before is kept.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from adapters_contenders import (
    Sizes,
    adamw,
    adapter_flops,
    flowing,
    frozen_flops,
    llama,
    methods,
    stepper,
    twin,
    with_ours,
    with_theirs,
)
from adapters_curve import CLAIMED, curve
from adapters_saved import measure
from common import RESULTS, alone, interleaved, paired_ratio, say, spread, write_result
from torch.profiler import ProfilerActivity, profile

from modicum.adapters.travel import travel_of

FULL = Sizes(512, 1376, 8, 8, 8192, 4, 256)
TINY = Sizes(128, 344, 4, 4, 256, 2, 32)
PARTS = ("sizes", "steps", "saved", "curve")
NAMED_OPERATIONS = 3
# The most that a step may take over the ratio of work, and over peft's; LoRA-FA's also over LoRA's.
WORK_BARS, WORK_BAR = {"lora": 1.08}, 1.15
PEFT_BARS = {"dora": 0.82, "randlora": 0.68, "qa_hira": 0.70}
PEFT_BAR, SAVED_BAR = 1.0, 1.03


def steps(names: list[str], sizes: Sizes, seed: int, rounds: int) -> dict[str, Any]:
    """Seconds of all in turns, by method: over the frozen step, over peft's, over LoRA's."""
    base = llama(sizes, seed)
    ids = torch.randint(sizes.vocabulary, (sizes.rows, sizes.tokens))
    work = frozen_flops(base, ids)
    runs = {"frozen": stepper(flowing(twin(base)), ids, None)}
    flops, rivals = {}, {}
    for name in dict.fromkeys(["lora", *names]):
        model, attached = with_ours(base, name, ids, seed=seed)
        flops[name] = 1 + adapter_flops(attached, sizes) / work
        trained = sum(p.numel() for p in attached.parameters())
        runs[name] = stepper(model, ids, adamw(attached.parameters()))
        if (pair := with_theirs(base, name, trained=trained)) is not None:
            theirs = sum(p.numel() for p in pair[0].parameters() if p.requires_grad)
            rivals[name] = {"trained": trained, "peft_trained": theirs}
            runs[f"peft {name}"] = stepper(pair[0], ids, pair[1])
        say(f"  {name} is ready")
    seconds = interleaved(runs, rounds=rounds, warm_up=2)
    usual = operations(runs["frozen"])
    found: dict[str, Any] = {}
    for name in flops:
        over = paired_ratio(seconds[name], seconds["frozen"])
        row: dict[str, Any] = {
            "seconds": spread(seconds[name]),
            "over_frozen": over,
            "work_over_frozen": flops[name],
            "over_work": over["median"] / flops[name],
            "over_lora": paired_ratio(seconds[name], seconds["lora"]),
        }
        if (own := seconds.get(f"peft {name}")) is not None:
            row |= {"peft_seconds": spread(own), **rivals[name]}
            row["over_peft"] = paired_ratio(seconds[name], own)
        if row["over_work"] > WORK_BARS.get(name, WORK_BAR):
            row["takes_more"] = more(usual, operations(runs[name]))
        found[name] = row
    return found


def sizes_of(names: list[str], sizes: Sizes, seed: int) -> dict[str, Any]:
    """By method: trained numbers, bytes of its own file's tensors, and where it can be used."""
    base = llama(sizes, seed)
    ids = torch.randint(sizes.vocabulary, (sizes.rows, sizes.tokens))
    found = {}
    for name in names:
        _, attached = with_ours(base, name, ids, seed=seed)
        travel = travel_of(attached)
        found[name] = {
            "trained": sum(p.numel() for p in attached.parameters()),
            "stored_bytes": sum(each.nbytes for each in attached.state_dict().values()),
            "loads_in": travel.loads_in,
            "reason": travel.reason,
            "merges": "mergeable" in attached.method.traits,
        }
    return found


def operations(run: Any) -> Counter[str]:
    """Microseconds of a step by operation, of its own alone."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return Counter({e.key: int(e.self_cpu_time_total) for e in profiler.key_averages()})


def more(usual: Counter[str], own: Counter[str]) -> dict[str, int]:
    """The operations that take most time more than in the frozen step, in microseconds."""
    return dict((own - usual).most_common(NAMED_OPERATIONS))


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its figure, and whether it holds."""
    rows = []

    def bar(what: str, figure: float, most: float) -> None:
        rows.append({"what": what, "figure": figure, "at_most": most, "holds": figure <= most})

    for name, row in figures.get("steps", {}).items():
        bar(f"{name}: step over work", row["over_work"], WORK_BARS.get(name, WORK_BAR))
        if "over_peft" in row:
            most = PEFT_BARS.get(name, PEFT_BAR)
            bar(f"{name}: step over peft's", row["over_peft"]["median"], most)
        if name == "lora_fa":
            bar("lora_fa: step over our LoRA's", row["over_lora"]["median"], 1.0)
    for name, cases in figures.get("saved", {}).items():
        for case, row in cases.items():
            bar(f"{name}: saved over needed, {case}", row["over_needed"], SAVED_BAR)
            if "over_peft" in row:
                bar(f"{name}: saved over peft's, {case}", row["over_peft"], 1.0)
    for row in figures.get("curve", []):
        if row["bound"] >= CLAIMED:
            what = f"LoRA-FA at width {row['width']}, {row['positions']} positions: 1.4 over ratio"
            bar(what, CLAIMED / row["ratio"], 1.0)
    return rows


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs of the same settings measured."""
    path = RESULTS / "adapters.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    if known["settings"] != settings:
        return {}
    return {part: known[part] for part in PARTS if part in known}


def main() -> None:
    """Measure what is asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; keeps no result")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--methods", nargs="+", choices=methods(), default=methods())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of peft and transformers, about themselves
    transformers.logging.disable_progress_bar()
    sizes = TINY if arguments.quick else FULL
    settings = {
        **vars(sizes),
        "rounds": arguments.rounds,
        "seed": arguments.seed,
        "threads": torch.get_num_threads(),
    }
    figures = {} if arguments.quick else kept(settings)
    with alone():
        torch.manual_seed(arguments.seed)
        if "sizes" in arguments.parts:
            measured = sizes_of(arguments.methods, sizes, arguments.seed)
            figures["sizes"] = figures.get("sizes", {}) | measured
        if "saved" in arguments.parts:
            say("saved bytes")
            saved = measure(arguments.methods, sizes, arguments.seed, layers=4)
            figures["saved"] = figures.get("saved", {}) | saved
        if "curve" in arguments.parts:
            say("LoRA-FA's curve")
            figures["curve"] = curve(quick=arguments.quick)
        if "steps" in arguments.parts:
            say("steps")
            found = steps(arguments.methods, sizes, arguments.seed, arguments.rounds)
            figures["steps"] = figures.get("steps", {}) | found
    figures["bars"] = bars(figures)
    for row in figures["bars"]:
        sign = "holds" if row["holds"] else "FALLS"
        say(f"{sign}  {row['what']}: {row['figure']:.3f} (at most {row['at_most']})")
    if arguments.quick:
        print(json.dumps(figures, indent=2))
    else:
        write_result("adapters", figures, settings)


if __name__ == "__main__":
    main()
