"""The page "Which adapter should I use?", from committed results alone.

An answer stands with the figure that carries it; `carried` gives both, and a test asks that each
figure still does.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adapter_costs

from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.travel import LOADS_IN, travel_form
from modicum.planner.advice import ANSWERS
from modicum.planner.combinations import refusal
from modicum.planner.combinations import rows as combined_rows
from modicum.recipe.slots import methods_for

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
VARIANTS = {"rslora": "lora"}
CASE = "bf16, dropout 0"


@dataclass(frozen=True)
class Carried:
    """What was measured for an answer.

    Args:
        words: the figure in a sentence, and the command that made it.
        figure, bar: what must be at most what, for the answer to stand.
    """

    words: str
    figure: float
    bar: float

    @property
    def holds(self) -> bool:
        """Whether the figure carries the answer."""
        return self.figure <= self.bar


def result(name: str) -> dict[str, Any]:
    """A committed result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def criterion(name: str, sentence: str, size: str = ".full") -> Mapping[str, Any]:
    """One criterion of a method's proof."""
    criteria = result(f"proofs/{name}{size}")["criteria"]
    [found] = [each for each in criteria if each["sentence"] == sentence]
    return dict(found)


def measured(name: str, figure: str) -> Mapping[str, Any]:
    """One figure of a method's full proof."""
    [found] = [each for each in result(f"proofs/{name}.full")["figures"] if each["name"] == figure]
    return dict(found)


def carried() -> dict[str, Carried]:
    """By answer, the figure that carries it."""
    return {answer.name: _FIGURES[answer.name]() for answer in ANSWERS}


def _activations() -> Carried:
    saved = result("adapters")["saved"]
    share = saved["lora_fa"][CASE]["ours"] / saved["lora"][CASE]["ours"]
    return Carried(
        f"{share:.0%} of LoRA's saved bytes at the same rank, in bf16; the frozen model alone "
        f"keeps {saved['lora'][CASE]['floor'] / saved['lora'][CASE]['ours']:.0%} "
        "(`benchmarks/adapters.py`)",
        share,
        0.9,
    )


def _base() -> Carried:
    bits = criterion("nf4", "bits an element, scales included")["figure"]
    held = measured("loram", "bytes of the base in training, 25% pruned")["ratio"]
    gap = measured("loram", "of LoRA's gap, closed in the full model, 25% pruned")["method"]
    return Carried(
        f"nf4 holds {bits:.2f} bits a weight (`prove nf4 --full`); LoRAM on a small decoder "
        f"without a quarter of its MLPs' neurons closes {gap:.1%} of the gap that LoRA closes, "
        f"with {held:.0%} of the base's bytes (`prove loram --full`)",
        max(bits / 4.2, held / 0.9, 0.99 / gap),
        1.0,
    )


def _few_bits() -> Carried:
    lost = criterion("qa_hira", "what merging costs at any number of bits (nats)", "")["figure"]
    return Carried(
        f"merging costs at most {lost:.1g} nats at 4, 3 and 2 bits (`prove qa_hira`)",
        lost,
        1e-4,
    )


def _many_users() -> Carried:
    fewer = criterion("lora_xs", "LoRA's trained numbers over its own")["figure"]
    above = criterion("lora_xs", "test accuracy over LoRA's of rank 4")
    return Carried(
        f"LoRA-XS has {above['figure']:+.3f} accuracy over LoRA's of rank 4 with {fewer:.0f} times "
        "fewer trained numbers, on turned digits (`prove lora_xs --full`)",
        -above["figure"],
        0.0,
    )


def _switching() -> Carried:
    rows = result("switching")["places"]["one layer of 4096"]
    times = {name: rows[f"{name}, sized"]["lora_over"]["median"] for name in ("s2ft", "shira")}
    return Carried(
        f"LoRA's change of rank 32 takes {times['s2ft']:.0f} times as long as S2FT's and "
        f"{times['shira']:.1f} times as long as SHiRA's, on a layer of 4,096 "
        "(`benchmarks/switching.py`)",
        1 / min(times.values()),
        1 / 4,
    )


def _high_rank() -> Carried:
    found = criterion("soka", "test errors after 200 steps")
    return Carried(
        f"{found['figure']:.2f} of the test errors of LoRA of as many numbers, on turned digits "
        "(`prove soka --full`)",
        found["figure"],
        0.9,
    )


def _small_shift() -> Carried:
    found = criterion("svfit", "test errors, of those of LoRA of rank 2")
    numbers = criterion("svfit", "trained numbers, of LoRA's")
    return Carried(
        f"{found['figure']:.2f} of the test errors of LoRA of rank 2 with {numbers['figure']:.0%} "
        "of its numbers, on darker, noisy digits (`prove svfit --full`)",
        found["figure"],
        1.0,
    )


_FIGURES: dict[str, Callable[[], Carried]] = {
    "activations": _activations,
    "base": _base,
    "few_bits": _few_bits,
    "many_users": _many_users,
    "switching": _switching,
    "high_rank": _high_rank,
    "small_shift": _small_shift,
}


def files() -> dict[str, str]:
    """The page and its pictures, by their places in the documentation."""
    return {
        "how-to/which-adapter.md": page(),
        "assets/which-adapter.svg": picture(),
        "assets/adapters.svg": adapter_costs.picture(result("adapters")),
    }


def page() -> str:
    """The page, which embeds both pictures."""
    figures = carried()
    lines = [
        "# Which adapter should I use?",
        "",
        "LoRA, if nothing of the following is your case: it is well known, every program loads it, "
        "and what others gain they pay for elsewhere. Every figure here is from a committed result "
        "(`benchmarks/results`), measured on small models on a CPU: it says in which direction a "
        "method differs, not how much it will on yours.",
        "",
        "## Short answers",
        "",
        "| your case | take | because | measured |",
        "| --- | --- | --- | --- |",
    ]
    for answer in ANSWERS:
        take = f"`{answer.take}`".replace(", or ", "`, or `").replace(" and ", "` and `")
        said = figures[answer.name].words
        lines.append(f"| {answer.need} | {take} | {answer.words} | {said} |")
    lines += [
        "",
        "`modicum plan` says the first three where a plan's own figures speak for them. It never "
        "changes the method.",
        "",
        "## All of them",
        "",
        "*Trained*, *stored*, *saved* (activations for the backward pass, bf16) and *step* are of "
        "LoRA's at rank 16, each method as it is by default, on all linear layers of a Llama of "
        "34 M parameters with 4 rows of 256 tokens (`benchmarks/adapters.py`). *Accuracy* is what "
        "it has over LoRA of rank 4, in points, with at most as many trained numbers, each at its "
        "best learning rate: a network that knows upright digits learns turned ones "
        "(`benchmarks/adapter_quality.py`); the 95 % interval is over 5 seeds. That network "
        "has too few layers of one kind for DiffoRA to share any. *Claim* and *against* are the "
        "verdict of the method's proof ([what the words mean](../reference/proofs.md)). An empty "
        "cell was not measured there: methods behind blocks, and one that prunes the model, have "
        "models of their own in their proofs.",
        "",
        *_table(),
        "",
        "![Accuracy over LoRA's, with 95 % intervals, against saved bytes]"
        "(../assets/which-adapter.svg)",
        "",
        "Filled: no other has both a higher accuracy and fewer saved bytes.",
        "",
        "## What they cost",
        "",
        "Steps of that Llama over the frozen model's, with what their work alone would take; saved "
        "bytes over what the equations need; and LoRA's total memory over LoRA-FA's, by width and "
        "positions, next to the bound that the frozen model sets "
        "(`benchmarks/adapters.py`).",
        "",
        "![Steps and saved bytes of every adapter and of peft's, and LoRA-FA's curve next to its "
        "bound](../assets/adapters.svg)",
    ]
    return "\n".join(lines)


def _table() -> list[str]:
    found, quality = result("adapters"), result("adapter_quality")["methods"]
    lora = found["sizes"]["lora"]
    saved = found["saved"]["lora"][CASE]["ours"]
    lines = [
        "| method | trained | stored | saved | step | accuracy | claim | against | 4-bit base "
        "| merges | loads in |",
        "| --- |" + " --- |" * 10,
    ]
    for name in [*methods_for("adapter"), *VARIANTS]:
        record = catalog()[VARIANTS.get(name, name)]
        cells = [""] * 5
        if name in found["sizes"]:
            size, step = found["sizes"][name], found["steps"][name]["over_lora"]["median"]
            cells = [
                f"{size['trained'] / lora['trained']:.3g}",
                f"{size['stored_bytes'] / lora['stored_bytes']:.3g}",
                f"{found['saved'][name][CASE]['ours'] / saved:.2f}",
                f"{step:.2f}",
                _points(quality[name]["over_lora"]) if name in quality else "",
            ]
        verdict = [record.info.claim_verdict, str(record.info.against)]
        form = travel_form(record.info.traits)
        assert form is not None
        where = ["yes" if "mergeable" in record.info.traits else "no", LOADS_IN[form]]
        shown = [*cells, *verdict, _on_few_bits(record.name), *where]
        linked = f"[`{name}`](../reference/methods.md#{record.name})"
        lines.append(f"| {linked} | {' | '.join(shown)} |")
    return lines


def _points(over: Mapping[str, float]) -> str:
    mean, low, high = (100 * over[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _on_few_bits(name: str) -> str:
    row = next(row for row in combined_rows() if row.name == name)
    return "yes" if refusal(row, "quantized") is None else "no"


def picture() -> str:
    """Accuracy over saved bytes, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    quality, saved = result("adapter_quality")["methods"], result("adapters")["saved"]
    lora = saved["lora"][CASE]["ours"]
    spots = {n: (saved[n][CASE]["ours"] / lora, row["over_lora"]) for n, row in quality.items()}
    figure, axes = plt.subplots(figsize=(9, 6))
    for name, (x, over) in spots.items():
        best = not any(other[0] < x and other[1]["mean"] > over["mean"] for other in spots.values())
        mean, low, high = (100 * over[key] for key in ("mean", "low", "high"))
        filled = "tab:blue" if best else "none"
        axes.errorbar(x, mean, [[mean - low], [high - mean]], color="tab:gray", linewidth=0.7)
        axes.plot(x, mean, "o", color="tab:blue", markerfacecolor=filled)
        axes.annotate(name, (x, mean), (4, 3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("saved bytes over LoRA's, bf16")
    axes.set_ylabel("accuracy over LoRA's at no more numbers, points")
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    plt.close(figure)
    return drawn.getvalue()
