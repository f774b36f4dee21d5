"""The page in a browser: what it draws is what the files hold, by pointer, by keys, at any size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.report.conftest import run_folder, write_rows

from modicum import report

pytestmark = pytest.mark.slow
OpenTab = Callable[..., Any]
LOSS = "drawnCharts.find(d => d.chart.name === 'loss')"


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def drawn(tab: Any, chart: str, kind: str) -> list[tuple[float, float]]:
    """The points of a line as the chart's own table has them, the gaps of the join left out."""
    return [
        (x, y)
        for x, y in tab.value(f"""(() => {{
            const drawn = drawnCharts.find(d => d.chart.name === "{chart}");
            const place = 1 + drawn.lines.findIndex(line => line.kind === "{kind}");
            return drawn.plot.data[0].map((x, i) => [x, drawn.plot.data[place][i] ?? null]);
        }})()""")
        if y is not None
    ]


def place(tab: Any, x: float) -> tuple[float, float]:
    """Where in the window a step of the loss's chart is."""
    box = tab.value(f"""(() => {{
        {LOSS}.holder.scrollIntoView({{block: "center"}});
        const box = {LOSS}.plot.over.getBoundingClientRect();
        return [box.left + {LOSS}.plot.valToPos({x}, "x"), box.top + box.height / 2];
    }})()""")
    return float(box[0]), float(box[1])


def test_curves_are_the_numbers_of_the_files(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    for column, kind in (("loss", "raw"), ("gradient_norm", "raw"), ("learning_rate", "plain"),
                         ("bytes", "plain"), ("tokens_per_second", "raw")):  # fmt: skip
        assert drawn(page, column, kind) == [(r["step"], r[column]) for r in rows(runs[0])]
    checked = [(row["step"], row["loss"]) for row in rows(runs[0], "evaluations.jsonl")]
    assert drawn(page, "loss", "checked") == checked
    page.value("document.querySelector('input[value=tokens]').click()")
    assert drawn(page, "loss", "raw") == [(4096 * r["step"], r["loss"]) for r in rows(runs[0])]
    assert [address for address in page.requests() if not address.startswith("data:")] == [
        (runs[0] / "report.html").as_uri()
    ]


def test_what_is_drawn_is_on_the_canvas(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    for name in ("loss", "learning_rate"):
        inked = page.value(f"""(() => {{
            const {{plot, chart}} = drawnCharts.find(d => d.chart.name === "{name}");
            const {{left, top, width, height}} = plot.bbox;
            const pixels = plot.ctx.getImageData(left, top, width, height).data;
            let count = 0;
            for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 128;
            return count;
        }})()""")
        assert inked > 1000


def test_smoothing_does_not_lag(tab: OpenTab, tmp_path: Path) -> None:
    noise = random.Random(0)
    falling = [{"step": s, "loss": 8 - s / 100 + noise.gauss(0, 0.05), "tokens": 1, "seconds": 1}
               for s in range(1, 401)]  # fmt: skip
    folder = run_folder(tmp_path / "falling")
    write_rows(folder / "metrics.jsonl", falling)
    page = tab(report.write(folder))
    smoothed = drawn(page, "loss", "smooth")
    assert len(smoothed) == 400
    for step, value in (smoothed[0], smoothed[200], smoothed[-1]):
        assert value == pytest.approx(8 - step / 100, abs=0.06)
    # Less noise than it began with, by the residuals of the line.
    residual = numpy.std([value - (8 - step / 100) for step, value in smoothed])
    assert residual < 0.4 * 0.05
    straight = page.value("smooth([0, 1, 2, 5, 6, 9], [0, 2, 4, 10, 12, 18], 7)")
    assert straight == pytest.approx([0, 2, 4, 10, 12, 18])


def test_the_pointer_reads_the_value_under_it(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    page.pointer("mouseMoved", *place(page, 100))
    page.wait(f"!{LOSS}.tip.hidden")
    text = page.value(f"{LOSS}.tip.innerText")
    assert "step 100 · 410 k tokens · 55" in text.replace("\n", " ")
    assert f"{rows(runs[0])[99]['loss']:.4f}" in text
    nearest = min(rows(runs[0], "evaluations.jsonl"), key=lambda row: abs(row["step"] - 100))
    assert f"{nearest['loss']:.4f}" in text
    assert f"validation at {nearest['step']}" in text


def test_a_drag_looks_closer_in_all_charts(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    first, last = place(page, 60), place(page, 120)
    page.pointer("mouseMoved", *first)
    page.pointer("mousePressed", *first)
    page.pointer("mouseMoved", (first[0] + last[0]) / 2, first[1])
    page.value("1")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=last[0], y=last[1], button="left",
              buttons=1)  # fmt: skip
    page.pointer("mouseReleased", *last)
    page.wait("state.range !== null")
    page.frame()
    ends = page.value("drawnCharts.map(d => [d.plot.scales.x.min, d.plot.scales.x.max])")
    assert len(ends) == 5
    for low, high in ends:
        assert low == pytest.approx(60, abs=1)
        assert high == pytest.approx(120, abs=1)
    page.value("document.getElementById('all').click()")
    page.frame()
    assert page.value(f"[{LOSS}.plot.scales.x.min, {LOSS}.plot.scales.x.max]") == [0, 240]


def test_keys_read_zoom_and_leave(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    page.value("document.getElementById('all').parentElement.lastChild.focus()")
    for _ in range(9):
        if page.value("document.activeElement.className") == "plot":
            break
        page.press("Tab")
    spoken = "document.getElementById('spoken').textContent"
    page.press("Home")
    assert f"{rows(runs[0])[0]['loss']:.4f}" in page.value(spoken)
    page.press("ArrowRight")
    page.press("ArrowRight", modifiers=8)  # Shift
    assert page.value(spoken).startswith("step 12 ·")
    assert f"{rows(runs[0])[11]['loss']:.4f}" in page.value(spoken)
    page.press("+")
    assert page.value("state.range[1] - state.range[0]") == pytest.approx(120)
    page.press("End")
    assert page.value(spoken).startswith("step 126 ·")
    page.press("0")
    assert page.value("state.range") is None
    page.press("l")
    assert page.value(f"{LOSS}.plot.scales.y.distr") == 3
    ticks = page.value(f"{LOSS}.plot.axes[1]._values.filter(text => text)")
    assert ticks
    assert all(len(text) <= 4 for text in ticks), ticks
    page.press("Escape")
    assert page.value("document.activeElement.className") != "plot"
    assert page.value(f"{LOSS}.tip.hidden")


@pytest.mark.parametrize("by_key", [False, True])
def test_a_chart_is_made_larger_and_small_again(
    tab: OpenTab, runs: list[Path], by_key: bool
) -> None:
    page = tab(report.write(runs[0]))
    norm = "drawnCharts.find(d => d.chart.name === 'gradient_norm')"
    button = f"{norm}.figure.querySelector('.size')"

    def turn() -> None:
        if by_key:
            page.value(f"{norm}.holder.focus()")
            page.press("f")
        else:
            page.value(f"{button}.click()")
        page.frame()

    def size() -> list[float]:
        return list(page.value(f"[{norm}.plot.width, {norm}.plot.height]"))

    small = size()
    assert page.value(f"{LOSS}.figure.querySelector('.size')") is None  # it is large
    turn()
    page.wait(f"{norm}.plot.width > {1.8 * small[0]}")
    assert size()[1] > 1.5 * small[1]
    assert page.value(f"{button}.getAttribute('aria-pressed')") == "true"
    page.value("redraw()")
    assert size()[1] > 1.5 * small[1]
    turn()
    page.wait(f"{norm}.plot.width === {small[0]}")
    assert size() == small


def test_runs_are_laid_over_each_other(tab: OpenTab, runs: list[Path], tmp_path: Path) -> None:
    page = tab(report.compare(runs, tmp_path / "both.html"))
    lines = page.value(f"{LOSS}.lines.map(line => [line.run.name, line.kind, line.y.length])")
    assert lines == [
        [name, kind, count]
        for name, steps, checks in (("long", 240, 7), ("short", 120, 4))
        for kind, count in (("raw", steps), ("smooth", steps), ("checked", checks))
    ]
    page.pointer("mouseMoved", *place(page, 80))
    page.wait(f"!{LOSS}.tip.hidden")
    text = page.value(f"{LOSS}.tip.innerText")
    assert "long, validation" in text
    assert "short, validation" in text
    page.value("document.querySelector('.toggle').click()")
    assert page.value(f"[...new Set({LOSS}.lines.map(line => line.run.name))]") == ["short"]


@pytest.mark.parametrize("several", [False, True])
def test_a_phone_loses_nothing(
    tab: OpenTab, runs: list[Path], tmp_path: Path, several: bool
) -> None:
    seen = [{"layer": "model.layers.0.self_attn", "head": head, "gamma": 0.125, "length": 4096,
             "width": 16, "degree": 3, "error": 1e-3, "columns": 969, "speedup": 0.26,
             "verdict": "linear path after outlier removal"} for head in range(4)]  # fmt: skip
    looked = run_folder(tmp_path / "looked", resumed_after=[120])
    with open(looked / "evaluations.jsonl", "a") as handle:
        handle.write(json.dumps({"step": 280, "loss": 2.0, "findings": {"diagnosis": seen}}) + "\n")
    both = report.compare(runs, tmp_path / "both.html") if several else report.write(looked)
    page = tab(both, width=400)
    assert page.value("innerWidth") == 400
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    beyond = page.value("""[...document.querySelectorAll("td, .tile, .plot, .uplot, button, h2")]
        .filter(one => one.offsetParent && one.getBoundingClientRect().right > 400.5)
        .map(one => one.textContent)""")
    assert beyond == []


def test_on_a_phone_the_reading_covers_no_curve(
    tab: OpenTab, runs: list[Path], tmp_path: Path
) -> None:
    page = tab(report.compare(runs, tmp_path / "both.html"), width=400)
    page.pointer("mouseMoved", *place(page, 80))
    page.wait(f"!{LOSS}.tip.hidden")
    top, right, bottom = page.value(f"""(() => {{
        const tip = {LOSS}.tip.getBoundingClientRect();
        return [tip.top, tip.right, {LOSS}.plot.over.getBoundingClientRect().bottom];
    }})()""")
    assert top >= bottom
    assert right <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_by_day_and_by_night(tab: OpenTab, runs: list[Path], scheme: str) -> None:
    page = tab(report.write(runs[0]), prefers_color_scheme=scheme)
    contrasts = page.value("""(() => {
        const light = name => {
            const hex = colour(name), parts = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
            const [r, g, b] = parts.map(v => v / 255).map(v =>
                v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const page = light("page");
        return Object.fromEntries(["text", "ink", "train", "validation", "run-0", "run-1", "run-2",
            "run-3", "run-4", "run-5", "run-6", "run-7"].map(name => [name,
            (Math.max(page, light(name)) + 0.05) / (Math.min(page, light(name)) + 0.05)]));
    })()""")
    assert contrasts["text"] > 12
    assert contrasts["ink"] > 4.5
    assert min(contrasts.values()) > 3  # what WCAG asks of graphics
    luminous = page.value("getComputedStyle(document.body).backgroundColor")
    assert (luminous == "rgb(255, 255, 255)") == (scheme == "light")
    axis = page.value(f"{LOSS}.plot.axes[0].stroke()")
    assert axis == page.value("colour('ink')")


def test_no_text_of_a_run_becomes_a_script(tab: OpenTab, tmp_path: Path) -> None:
    evil = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
    folder = run_folder(tmp_path / "evil", error=evil, status="failed", stopped_early=3)
    metrics = [{"step": step, "loss": 1.0, evil: float(step)} for step in range(1, 9)]
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "samples.jsonl", [{"step": 3, "prompt": evil, "text": evil}])
    page = tab(report.write(folder))
    page.pointer("mouseMoved", *place(page, 3))
    page.wait(f"!{LOSS}.tip.hidden")
    assert "stopped early" in page.value(f"{LOSS}.tip.innerText")
    assert page.value("typeof window.owned") == "undefined"
    assert page.value("document.images.length") == 0
    assert page.value("document.querySelectorAll('.chart h3')[1].textContent").startswith(
        "</script>"
    )


def test_samples_are_chosen_by_their_step(tab: OpenTab, runs: list[Path]) -> None:
    page = tab(report.write(runs[0]))
    shown = "[...document.querySelectorAll('.later .piece')].find(p => !p.hidden).innerText"
    assert page.value(shown).startswith("After step 240")
    page.value("""(() => {
        const slider = document.querySelector(".later input");
        slider.value = 0;
        slider.dispatchEvent(new Event("input"));
    })()""")
    assert page.value(shown).startswith("After step 120")
