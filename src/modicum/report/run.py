"""Writes a run's `report.html`: one file, no script, nothing fetched from anywhere."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path
from typing import Any

from modicum.core import files
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.data.fitting import too_long_words
from modicum.data.image_files import class_words
from modicum.report import facts as told
from modicum.report import numbers, plots
from modicum.report.folder import FolderContents, listing, read, section

_SAMPLE = 6000  # characters of one sample that are shown
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")


def write(folder: str | Path) -> Path:
    """Write `report.html` into a run folder, atomically, and return its path.

    The run may have finished, failed, been interrupted, or be running; the page says which.

    Raises:
        InputError: there is no such run folder, its disk is full or read-only, or what draws the
            page is not installed.
    """
    try:
        run = read(folder)
        page = render(run)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the report needs {error.name}; install it with: pip install 'modicum[cli]'"
        ) from error
    target = run.path / "report.html"
    files.write_text(target, page)
    return target


def render(run: FolderContents) -> str:
    """The page, a function of the folder's content and of nothing else."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(
        quantity=numbers.quantity,
        short=numbers.short,
        percent=numbers.percent,
        signed=lambda value: numbers.percent(value, signed=True),
        visible=visible,
        moment=moment,
        colour=plots.colour,
        phase=plots.phase_title,
    )
    source = importlib.resources.files("modicum.report") / "template.html.j2"
    template = environment.from_string(source.read_text(encoding="utf-8"))
    return template.render(view(run)) + "\n"


def view(run: FolderContents) -> dict[str, Any]:
    """Everything that the template shows."""
    result = told.facts(run)
    prediction = section(run.plans[-1], "prediction") if run.plans else {}
    peak, phases = result["peak_bytes"], told.kinds_by_phase(run)
    kinds = dict.fromkeys(kind for stack in phases.values() for kind in stack)
    figures = {
        "losses": plots.losses(run.metrics, run.evaluations),
        "memory": plots.memory(phases, peak["budget"], peak["measured"]),
    }
    return {
        "facts": result,
        "run": run,
        "subject": subject(run.recipe),
        "counted": told.counted(run),
        "measures": told.measures(run),
        "best_step": numbers.number(section(run.run, "best").get("step")),
        "figures": figures,
        "small": small_figures(run, peak["budget"], prediction),
        "kinds": sorted(kinds, key=plots.rank),
        "by_kind": sorted(told.kinds_measured(run), key=lambda row: plots.rank(row["kind"])),
        "ledger": listing(prediction, "table"),
        "samples": samples(run.samples),
        "data_lines": data_lines(result),
        "choices": listing(run.plans[-1], "choices") if run.plans else [],
        "revisions": revisions(run.plans),
        "versions": section(run.run, "versions"),
        "machine": machine(section(run.run, "machine")),
    }


def small_figures(
    run: FolderContents, budget: float | None, prediction: JsonObject
) -> list[dict[str, Any]]:
    """The columns of the metrics that have a plot each, if anything was written of them."""
    expected = numbers.number(prediction.get("tokens_per_second"))
    limit = budget if told.counted(run) == "process" else None

    def rounded(value: float) -> str:
        return f"{value:.3g}"

    figures = [
        {
            "title": "Speed",
            "caption": "tokens/s",
            "line": "predicted" if expected is not None else "",
            "role": "measured",
            "svg": plots.over_steps(
                run.metrics, "tokens_per_second", label="Tokens per second over steps",
                write=numbers.short, average=True, lines={"measured": expected},
            ),
        },
        {
            "title": "Memory of the process",
            "caption": "resident size",
            "line": "budget" if limit is not None else "",
            "role": "budget",
            "svg": plots.over_steps(
                run.metrics, "bytes", label="Resident bytes over steps",
                write=numbers.in_bytes, lines={"budget": limit},
            ),
        },
        {
            "title": "Gradient norm",
            "caption": "before clipping",
            "line": "",
            "svg": plots.over_steps(
                run.metrics, "gradient_norm", label="Gradient norm over steps",
                write=rounded, average=True,
            ),
        },
        {
            "title": "Learning rate",
            "caption": "",
            "line": "",
            "svg": plots.over_steps(
                run.metrics, "learning_rate", label="Learning rate over steps", write=rounded
            ),
        },
    ]  # fmt: skip
    return [figure for figure in figures if figure["svg"] is not None]


def data_lines(result: dict[str, Any]) -> list[str]:
    """What packing made of the data, in sentences; none where the run does not say."""
    counts, lines = section(result, "data"), []
    rows, documents, trained, waste = (
        numbers.number(counts.get(key)) for key in ("rows", "documents", "trained", "waste")
    )
    if rows is not None and documents is not None and trained is not None:
        lines.append(
            f"{documents:,} documents make {rows:,} rows with {trained:,} trained tokens; "
            f"{numbers.percent(waste or 0.0)} of the rows is padding."
        )
    if classes := integers(section(counts, "classes")):
        lines.append(f"Images: {class_words(classes)}.")
    known = {key: value for key, value in counts.items() if numbers.number(value) is not None}
    if words := too_long_words(known):
        lines.append(f"Longer than a row: {words}.")
    if empty := numbers.number(counts.get("empty")):
        lines.append(f"Left out, as nothing is learned in them: {empty:,}.")
    return lines


def integers(values: JsonObject) -> dict[str, int]:
    """Those of a file's values that are counts."""
    return {name: value for name, value in values.items() if type(value) is int}


def subject(recipe: JsonObject) -> dict[str, str]:
    """What was trained, on what, and how, as far as the recipe says."""

    def named(part: Any, key: str) -> str:
        if isinstance(part, str):
            return part
        value = part.get(key) if isinstance(part, dict) else None
        return value if isinstance(value, str) else ""

    adapter, model = section(recipe, "adapter"), section(recipe, "model")
    method, rank = named(recipe.get("adapter"), "method"), numbers.number(adapter.get("rank"))
    if method and rank is not None:
        method += f" (rank {rank})"
    source = named(recipe.get("model"), "path")
    layers, width = numbers.number(model.get("layers")), numbers.number(model.get("width"))
    if not source and layers is not None and width is not None:
        source = f"a new decoder, {layers} blocks of width {width}"
    data = section(recipe, "data")
    library = "the Python standard library" if "path" in data and data["path"] is None else ""
    return {
        "model": source,
        "data": named(recipe.get("data"), "path") or library,
        "method": method or ("full training" if recipe else ""),
    }


def samples(rows: list[JsonObject]) -> list[dict[str, Any]]:
    """For each prompt its first sample and its last, and how many lie between."""
    by_prompt: dict[str, dict[float, str]] = {}
    for row in rows:
        step, prompt, text = numbers.number(row.get("step")), row.get("prompt"), row.get("text")
        if step is not None and isinstance(prompt, str) and isinstance(text, str):
            by_prompt.setdefault(prompt, {})[step] = text
    shown = []
    for prompt, texts in by_prompt.items():
        steps = sorted(texts)
        ends = [steps[0], steps[-1]] if len(steps) > 1 else steps
        pieces = []
        for step in ends:
            # A model's answer may or may not repeat the prompt; the page shows it once, dimmed.
            text = texts[step].removeprefix(prompt)
            pieces.append({"step": step, "text": text[:_SAMPLE], "cut": len(text) > _SAMPLE})
        shown.append({"prompt": prompt, "pieces": pieces, "between": len(steps) - len(ends)})
    return shown


def revisions(plans: list[JsonObject]) -> list[dict[str, Any]]:
    """Each revision of the plan: when, why, and the choices that it changed."""
    shown: list[dict[str, Any]] = []
    before: dict[str, Any] = {}
    for plan in plans:
        choices = {str(row.get("field")): row.get("value") for row in listing(plan, "choices")}
        changed = {name: value for name, value in choices.items() if before.get(name) != value}
        shown.append(
            {
                "revision": plan.get("revision"),
                "when": plan.get("when"),
                "why": plan.get("why"),
                "changed": changed,
            }
        )
        before = choices
    return shown


def machine(record: JsonObject) -> dict[str, str]:
    """The machine's record, with its units."""
    shown = {}
    for name, value in record.items():
        known = numbers.number(value)
        if name.endswith("_bytes") and known is not None:
            shown[name.removesuffix("_bytes")] = numbers.in_bytes(known)
        else:
            shown[name.replace("_", " ")] = "none" if value is None else str(value)
    return shown


def visible(text: Any) -> str:
    """Text with what no page can hold (control characters, half characters) made visible."""

    def replace(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\ufffd"

    return _CONTROLS.sub(replace, str(text).replace("\r\n", "\n"))


def moment(text: Any) -> str:
    """An ISO time to the second, with a space where ISO has its T."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:?\d\d)?", str(text))
    if match is None:
        return visible(text)
    zone = {"Z": " UTC", "+00:00": " UTC", None: ""}.get(match[3], f" {match[3]}")
    return f"{match[1]} {match[2]}{zone}"
