"""The page, read back: what it shows is what the folder holds, whatever became of the folder."""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.conftest import RECIPE, metrics

from modicum import report
from modicum.cli.run_text import print_run
from modicum.core.errors import InputError
from modicum.core.units import format_bytes
from modicum.report import facts, page
from modicum.report.folder import FILES, read

MakeRun = Callable[..., Path]
ABC = "abcdefghijklmnopqrstuvwxyz"
VOID = {"meta", "br", "hr", "img", "link", "input", "path", "use", "rect"}


class Page(HTMLParser):
    """Text, ids, and the nesting of tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.open, self.unbalanced = html, list[str](), list[str]()
        self.pieces, self.ids, self.tags = list[str](), list[str](), list[str]()
        self.addresses: list[str] = []
        self.feed(html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.addresses.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.pieces.append(data)


def written(folder: Path) -> Page:
    return Page(report.write(folder).read_text(encoding="utf-8"))


def test_it_shows_the_numbers_of_run_json(make_run: MakeRun) -> None:
    folder = make_run()
    run, text = json.loads((folder / "run.json").read_text()), written(folder).text
    for name in ("predicted", "measured", "process", "process_predicted", "budget"):
        assert format_bytes(run["peak_bytes"][name]) in text
    assert f"{run['final']['validation_loss']:.4f} nats per token" in text
    assert "from 3.9871 before training" in text
    assert "7,432 tokens/s" in text
    assert "983 k tokens trained in 240 steps" in text
    assert "594 k of 30.1 M parameters trained (2.0 %)" in text
    assert "lora (rank 8) of runs/demo-train/model on unseen/" in text
    assert "Budget kept , 87 % used" in text
    # 498,765,432 / 512,000,000 - 1, and of the updates 137.4 / 140.4 - 1
    assert "512 MB 499 MB −2.6 %" in text
    assert "2 min 20 s 2 min 17 s −2.1 %" in text
    for value in (*run["versions"].values(), "x86_64", "8.35 GB", "adapter/"):
        assert value in text
    assert "2026-03-01 10:20:30 UTC" in text
    assert "The run was interrupted 1 time" in text


def test_it_is_one_file_without_addresses(make_run: MakeRun) -> None:
    shown = written(make_run())
    ours = re.sub(r"<!--.*?-->|<script>.*?</script>", "", shown.html, flags=re.DOTALL)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", ours)
    assert shown.addresses == []
    assert not {"link", "img", "iframe", "object"} & set(shown.tags)
    assert not shown.unbalanced
    assert not shown.open


def test_only_the_scripts_that_were_put_in_may_run(make_run: MakeRun) -> None:
    html = written(make_run()).html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    stated = unescape(policy[1])
    assert stated.startswith("default-src 'none'; ")
    assert "connect-src 'none'" in stated
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-(.*?)'", stated) == digests
    assert html.count("<script") == len(scripts) + 1  # and the numbers, which are no script


def test_what_it_is_made_of_keeps_its_licence(make_run: MakeRun) -> None:
    html = written(make_run()).html
    assert "uPlot (v1.6.32)" in html
    assert "Copyright (c) 2022 Leon Sorokin" in html
    assert "The above copyright notice and this permission notice shall be included" in html


def test_light_and_dark_name_the_same_colours(make_run: MakeRun) -> None:
    html = written(make_run()).html
    light, dark = (
        set(re.findall(r"--([a-z0-9-]+): #", part))
        for part in html.split("prefers-color-scheme: dark", 1)
    )
    roles = set(re.findall(r"var\(--([a-z-]+\d?)\)", html)) - {"c"}
    assert {"ink", "grid", "budget", "measured", "activation"} <= roles
    assert roles <= light
    assert roles <= dark | {"c"}


def test_the_numbers_of_the_curves_are_in_it(make_run: MakeRun) -> None:
    folder = make_run()
    found = re.search(r'id="payload">(.*?)</script>', written(folder).html)
    assert found is not None
    drawn = json.loads(found[1])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = drawn["runs"][0]["metrics"]["loss"]
    assert loss["value"] == [row["loss"] for row in rows]
    assert loss["tokens"] == [4096 * row["step"] for row in rows]
    assert [chart["name"] for chart in drawn["charts"]][:2] == ["loss", "tokens_per_second"]


def test_the_recipe_s_own_fields_stand_before_the_defaults(make_run: MakeRun) -> None:
    text = written(make_run()).text
    own, defaults = text.index("What is other than by default"), text.index("Fields at their")
    assert own < text.index("training.steps 240 1000") < defaults
    assert own < text.index("budget.memory 1.2GB –") < defaults


def test_the_same_folder_gives_the_same_page(make_run: MakeRun) -> None:
    folder = make_run()
    assert report.write(folder).read_bytes() == report.write(folder).read_bytes()
    assert not list(folder.glob(".*"))


def test_samples_are_escaped_and_stand_in_order(make_run: MakeRun) -> None:
    folder = make_run()
    evil = {"step": 240, "prompt": "<script>alert(1)</script>", "text": '</pre><b onload="x">&\x00'}
    with open(folder / "samples.jsonl", "a") as handle:
        handle.write(json.dumps(evil) + "\n" + json.dumps(evil | {"text": "\ud800 half"}) + "\n")
    shown = written(folder)
    assert "<script>alert" not in shown.html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown.html
    assert "\ufffd half" in shown.html  # the later of the two samples of a step
    assert "cd b_ret)) = <x> import" in shown.text
    before, after = shown.html.index("Before training"), shown.html.index("After step 120")
    assert before < shown.html.index("cd b_ret") < after < shown.html.index("Parse text &amp;")
    assert after < shown.html.index("if text:") < shown.html.index("Parse text &amp;")


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(make_run: MakeRun, missing: str) -> None:
    folder = make_run()
    (folder / missing).unlink()
    shown = written(folder)
    assert not shown.unbalanced
    assert "undefined" not in shown.text
    if missing == "run.json":
        assert "How the run ended is not known" in shown.text
        # Tokens over seconds of the metrics: 240 * 4096 / (240 * 0.55).
        assert "7,446 tokens/s" in shown.text


@pytest.mark.parametrize("alone", FILES)
def test_any_file_may_be_the_only_one(make_run: MakeRun, alone: str) -> None:
    folder = make_run()
    for name in FILES:
        if name != alone:
            (folder / name).unlink()
    assert not written(folder).unbalanced


@pytest.mark.parametrize("damaged", FILES)
def test_any_file_may_be_cut_off(make_run: MakeRun, damaged: str) -> None:
    folder = make_run()
    content = (folder / damaged).read_bytes()
    (folder / damaged).write_bytes(content[: len(content) - 20])
    shown = written(folder)
    assert not shown.unbalanced
    if damaged.endswith(".jsonl"):
        assert f"{damaged}: 1 line was truncated or damaged" in shown.text


def test_a_run_that_grows_counts_the_whole_lines(make_run: MakeRun) -> None:
    folder = make_run(steps=3, status="running", final={}, ended=None)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"steps": None, "tokens": None}))
    rows = metrics(3)
    with open(folder / "metrics.jsonl", "a") as handle:
        handle.write(json.dumps(rows[1] | {"loss": 9.0}) + '\n{"step": 4, "los')
    result = report.summary(folder)
    assert result["status"] == "running"
    assert result["steps"] == 3
    assert result["steps_planned"] == 240
    assert result["tokens"] == 3 * 4096
    assert result["loss"]["final"] == rows[2]["loss"]
    assert read(folder).metrics.values("loss")[1] == 9.0  # written last, so it counts
    text = written(folder).text
    assert "had not ended when this page was written" in text
    assert "in 3 of 240 steps" in text


@pytest.mark.parametrize(
    ("status", "sentence"),
    [("failed", "The run failed. step 7: the loss is no number <fix>"),
     ("interrupted", "The run was interrupted after step 240")],
)  # fmt: skip
def test_it_says_how_the_run_ended(make_run: MakeRun, status: str, sentence: str) -> None:
    error = "step 7: the loss is no number <fix>"
    text = written(make_run(status=status, error=error)).text
    assert sentence in text
    # What was not finished took no time that a whole run's could be compared with.
    assert "2 min 20 s 2 min 17 s –" in text


def test_a_budget_that_was_not_kept(make_run: MakeRun) -> None:
    peak = {"predicted": 1, "measured": 2, "process": 1_043_210_000, "budget": 900_000_000}
    folder = make_run(peak_bytes=peak)
    assert report.summary(folder)["budget_kept"] is False
    assert "Over budget by 143 MB" in written(folder).text


def test_on_an_accelerator_the_budget_is_about_tensors(make_run: MakeRun) -> None:
    folder = make_run(
        machine={"accelerator": "H200"},
        peak_bytes={"measured": 800_000_000, "process": 5_000_000_000, "budget": 900_000_000},
    )
    assert report.summary(folder)["budget_kept"] is True
    assert "800 MB of 900 MB" in written(folder).text


def test_cost_and_lost_work_are_said_where_they_are_known(make_run: MakeRun) -> None:
    assert "<h2>Cost" not in written(make_run()).html
    saves = {"every_seconds": 170.0, "lost_seconds": 85.0, "share": 0.0235}
    cost = {"money": 5.004, "currency": "EUR", "kwh": 0.8123, "kwh_by": "stated"}
    shown = written(make_run(cost=cost, saves=saves)).text
    assert "Money: 5.00 EUR." in shown
    assert "Energy: 0.812 kWh (stated)." in shown
    assert "Saved every 2 min 50 s: a failure loses 1 min 25 s of work on average" in shown
    assert "2.4 % of the time" in shown


def test_revisions_stand_beside_the_first_plan(make_run: MakeRun) -> None:
    folder = make_run(plans=3)
    text = written(folder).text
    assert "First plan Last plan Measured Difference" in text
    assert "the first step used more than predicted training.micro_batch_size = 6" in text


@pytest.mark.parametrize(
    ("plans", "header"),
    [(3, "First plan Last plan Measured"), (1, "Predicted Measured")],
)
def test_the_text_says_of_which_plan_a_figure_is(
    make_run: MakeRun, plans: int, header: str
) -> None:
    stream = io.StringIO()
    print_run(make_run(plans=plans), stream)
    assert header in " ".join(stream.getvalue().split())


def test_the_summary_is_strict_json(make_run: MakeRun) -> None:
    folder = make_run(tokens_per_second=float("nan"), seconds=float("inf"))
    result = json.loads(json.dumps(report.summary(folder), allow_nan=False))
    assert result["tokens_per_second"] == pytest.approx(4096 / 0.55, rel=1e-3)
    assert result["seconds"] == pytest.approx(240 * 0.55, rel=1e-3)
    assert result["peak_bytes"]["measured"] == 498_765_432
    assert result["comparison"][0]["difference"] == pytest.approx(-0.025849, abs=1e-6)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        report.write(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        report.summary(tmp_path / "absent")


def test_what_a_method_saw_stands_in_a_table_of_its_own(make_run: MakeRun) -> None:
    folder = make_run()
    seen = [
        {"layer": "model.layers.0.self_attn", "head": head, "gamma": 0.125, "degree": degree,
         "length": 4096, "verdict": verdict}
        for head, degree, verdict in ((0, 3, "linear path"), (1, None, "<exact> only"))
    ]  # fmt: skip
    with open(folder / "evaluations.jsonl", "a") as handle:
        for step in (240, 280):
            row = {"step": step, "loss": 2.0, "findings": {"diagnosis": seen, "empty": []}}
            handle.write(json.dumps(row) + "\n")
    shown = written(folder)
    assert "Diagnosis, step 280 layer verdict head gamma degree length" in shown.text
    assert "model.layers.0.self_attn linear path 0 0.125 3 4,096" in shown.text
    assert "model.layers.0.self_attn <exact> only 1 0.125 – 4,096" in shown.text
    assert shown.html.count('data-label="verdict"') == 2
    assert "What lora_limits" not in shown.text
    (folder / "recipe.yaml").write_text(RECIPE + "diagnosis: {method: lora_limits}\n")
    shown = written(folder)
    assert "What lora_limits looks at, and what its columns say" in shown.text
    assert "over_threshold is Gamma / sqrt(log L), with the longest row of keys L." in shown.text
    assert not shown.unbalanced


def test_losses_and_counts_are_of_the_task_s_unit(make_run: MakeRun) -> None:
    folder = make_run(unit="sequences", data={"rows": 491_520})
    shown = written(folder)
    assert "2.3456 mean over sequences" in shown.text
    assert "983 k sequences trained in 240 steps" in shown.text
    assert "491,520 sequences, each of which the run trained 2 times, on average." in shown.text
    assert '"note":"mean over sequences"' in shown.html
    with open(folder / "evaluations.jsonl", "a") as handle:
        handle.write('{"step": 280, "loss": 2.0, "accuracy": 0.5, "sequences": 64}\n')
    shown = written(folder)
    assert '"title":"Accuracy"' in shown.html
    assert '"title":"Sequences"' not in shown.html
    assert "<td>sequences</td>" not in shown.html
    assert "nats per token" in written(make_run("other", unit=[3])).text


ANYTHING = st.sampled_from(
    [None, True, -1, 0, 1e300, float("nan"), "", "<x>", "\ud800", [], [None], [[1]], {}, {"a": 1}]
)


def damage(value: object, data: st.DataObject) -> object:
    """`value` with anything at all in the place of some part of it."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(ANYTHING)
    if isinstance(value, list):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], damage(value[place], data), *value[place + 1 :]]
    name = data.draw(st.sampled_from(sorted(value)))
    return value | {name: damage(value[name], data)}


@settings(max_examples=12)
@given(data=st.data())
def test_nothing_in_the_files_can_break_the_page(whole_run: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FILES if name != "recipe.yaml"]))
    original = (whole_run / name).read_text()
    first, *others = original.splitlines() if name.endswith("l") else [original]
    row = json.dumps(damage(json.loads(first), data))
    try:
        (whole_run / name).write_text("\n".join([*others, row]))
        run = read(whole_run)
        shown = Page(page.render([run]))
        shown.html.encode("utf-8")
        json.dumps(report.summary(whole_run), allow_nan=False).encode("utf-8")
    finally:
        (whole_run / name).write_text(original)
    assert not shown.unbalanced
    assert "<x>" not in shown.html


def test_a_recipe_that_stands_for_too_much_is_shown_as_it_is(make_run: MakeRun) -> None:
    aliases = "".join(f"{b}: &{b} [{'*' + a}, {'*' + a}]\n" for a, b in pairwise(ABC))
    folder = make_run()
    (folder / "recipe.yaml").write_text(f"a: &a [x]\n{aliases}")
    assert any("shown as it is" in note for note in read(folder).notes)


def test_metrics_stand_next_to_each_other_with_the_best(make_run: MakeRun) -> None:
    folder = make_run(best={"step": 40, "metric": "accuracy", "value": 0.75})
    rows = [
        {"step": 0, "loss": 2.5, "accuracy": 0.25, "tokens": 9, "by_class": {"<cats>": 0.125}},
        {"step": 40, "loss": 1.5, "accuracy": 0.75, "seconds": 1.0, "by_class": {"<cats>": 0.875}},
        {"step": 80, "loss": 1.25, "accuracy": 0.5, "tokens": 9, "by_class": {"<cats>": 0.375}},
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page.render([read(folder)])
    cells = re.findall(r"<td>(loss|accuracy.*?)</td>((?:<td.*?</td>)+)", text)
    shown = {name: re.findall(r">([\d.]+)<", values) for name, values in cells}
    assert shown == {
        "loss": ["2.5000", "1.2500", "1.5000"],
        "accuracy": ["0.2500", "0.5000", "0.7500"],
        "accuracy of &lt;cats&gt;": ["0.1250", "0.3750", "0.8750"],
    }
    assert "Best, step 40" in text
    assert "<td>tokens</td>" not in text
    assert "Test</th>" not in text


def test_the_test_stands_next_to_the_validation(make_run: MakeRun) -> None:
    test = {"step": 40, "loss": 1.75, "token_accuracy": 0.625, "tokens": 9, "rows": 3}
    folder = make_run(final={"loss": 2.0, "validation_loss": 2.5, "test": test})
    text = page.render([read(folder)])
    assert "Validation and test" in text
    [cells] = re.findall(r"<td>token accuracy</td>((?:<td.*?</td>)+)", text)
    assert re.findall(r">([\d.–]+)<", cells) == ["–", "–", "0.6250"]
    assert "<td>rows</td>" not in text
    result = facts.summary(folder)
    assert result["test"] == test
    assert result["loss"]["test"] == 1.75
