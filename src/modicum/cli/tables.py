"""Tables on standard output: rich's on a terminal, aligned plain text of 80 columns elsewhere.

rich is imported for a terminal only: `modicum methods | grep` must answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from modicum.cli.length_rows import length_rows
from modicum.cli.plain_tables import plain
from modicum.core.plain_values import finite
from modicum.core.units import format_bytes, format_duration
from modicum.data.fitting import too_long_words
from modicum.data.image_files import class_words
from modicum.report.numbers import number, percent, quantity, spent

TableRow = Sequence[Any]


def table(
    headers: Sequence[str],
    rows: Iterable[TableRow],
    *,
    title: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print rows under headers; a column of nothing but numbers is aligned to the right.

    Cells are shown by `str`, None as nothing. Long cells wrap: on a terminal at its width,
    elsewhere at 80 columns. What reads figures should ask for `--json`.
    """
    stream = stream or sys.stdout
    cells = [[_cell(value) for value in row] for row in rows]
    right = [_numeric([row[i] for row in cells if i < len(row)]) for i in range(len(headers))]
    if stream.isatty():
        from modicum.cli.rich_tables import print_rich

        print_rich(headers, cells, right, title, stream)
    else:
        stream.write(plain(headers, cells, right, title))


def plan_tables(plan: Mapping[str, Any]) -> tuple[list[TableRow], list[TableRow]]:
    """A plan's row as two tables' rows: its choices (field, value, why) and its costs (what, how
    much, remark)."""
    choices: list[TableRow] = [
        (choice.get("field"), _yes_or_no(choice.get("value")), choice.get("why"))
        for choice in plan.get("choices") or ()
        if isinstance(choice, Mapping)
    ]
    prediction = plan.get("prediction") or {}
    parameters = plan.get("parameters") or {}
    tensors, process, base, budget = (
        number(prediction.get(key))
        for key in ("peak_bytes", "process_bytes", "process_base", "budget_bytes")
    )
    costs: list[TableRow] = []
    if machine := plan.get("machine"):
        measured = "measured" if machine.get("measured") else "not measured"
        costs.append(("machine", machine.get("name"), f"{measured}: {machine.get('source')}"))
    ranks, layout = number(plan.get("ranks")), plan.get("layout") or {}
    if ranks is not None and ranks > 1:
        shards, replicas = layout.get("shards"), layout.get("replicas")
        each = f"{replicas} × {shards} to a copy of the weights" if shards != 1 else ""
        costs.append(("ranks", f"{ranks}", f"{layout.get('name')}{', ' if each else ''}{each}"))
    if (trainable := number(parameters.get("trainable"))) is not None:
        total = number(parameters.get("total"))
        frozen = total is not None and total != trainable
        costs.append(("parameters", f"{trainable:,}", f"trained, of {total:,}" if frozen else ""))
    if adapter := plan.get("adapter"):
        costs.append(("adapter loads in", adapter.get("loads_in"), adapter.get("reason")))
    if plan.get("weights") is False:
        costs.append(("weights", "none here", "enough for a plan; training needs them"))
    if tensors is not None:
        of = " of each rank" if ranks is not None and ranks > 1 else ""
        by = ", by a trace of the model" if prediction.get("ledger") == "traced" else ""
        most = "; the most there may be, until weights are read" * bool(
            prediction.get("counts_the_most")
        )
        costs.append(("tensors", format_bytes(tensors), f"at the peak{of}{by}{most}"))
    costs += _before(prediction)
    limit = "no budget was set" if budget is None else f"the budget is {format_bytes(budget)}"
    if base is not None:
        rest = "" if budget is None else f"; {format_bytes(budget - base)} of the budget are left"
        costs.append(("Python and torch", format_bytes(base), f"before the first tensor{rest}"))
    if process is not None:
        least_most = [format_bytes(each) for each in prediction.get("process_range") or ()]
        between = f"{' to '.join(least_most)}; " if least_most else ""
        costs.append(("process", format_bytes(process), between + limit))
    if sent := number(prediction.get("wire_bytes")):
        busy, waited = (
            number((plan.get("link") or {}).get(f"{what}_seconds")) for what in ("busy", "waited")
        )
        at_least = "; what that takes is not counted, as no link was measured (modicum bench link)"
        if busy is not None and waited is not None:
            at_least = f", {busy:.2g} s on the link, for which a step waits {waited:.2g} s"
        costs.append(("wire", format_bytes(sent), f"sent by each rank in an update{at_least}"))
    costs += data_rows(plan)
    if (rate := number(prediction.get("tokens_per_second"))) is not None:
        costs.append(("speed", quantity(rate, "tokens/s"), "prompts and padding among them"))
    costs += _time_rows(prediction)
    costs += [(name, said, "at the price and power stated") for name, said in spent(prediction)]
    return choices, costs


def _before(prediction: Mapping[str, Any]) -> list[TableRow]:
    """What is held before the first update, where the model is made smaller; or nothing."""
    if not (before := number(prediction.get("peak_before"))):
        return []
    return [("before", format_bytes(before), "tensors while the model is made smaller, once")]


def _time_rows(prediction: Mapping[str, Any]) -> list[TableRow]:
    """How long the steps take; nothing where that is not known."""
    if (seconds := number(prediction.get("seconds"))) is None:
        return []
    said = "of the steps; start, evaluations and saves come in addition"
    if (in_fp32 := number(prediction.get("seconds_in_fp32"))) is not None:
        said += f"; {format_duration(in_fp32)} with precision: fp32"
    return [("time", format_duration(seconds), said)]


def data_rows(plan: Mapping[str, Any]) -> list[TableRow]:
    """What a plan says of the data: rows, tokens, steps and epochs, and what is too long."""
    counts = plan.get("counts") or {}
    found: list[TableRow] = []
    rows, documents, trained = (number(counts.get(k)) for k in ("rows", "documents", "trained"))
    about = "" if counts.get("exact") else "about "
    if counts.get("streamed"):
        found.append(("streamed", "", "read, tokenized and packed as training asks for it"))
    if documents is not None:
        words = "texts or conversations to train on; what is held out is not counted here"
        found.append(("documents", f"{about}{documents:,}", words))
    if rows is not None:
        said = []
        if documents is not None and trained is not None:
            waste = number(counts.get("waste")) or 0.0
            said = ["what the model reads at once", f"{about}{trained:,} trained tokens in all"]
            said += [f"{percent(waste)} is padding"]
        found.append(("rows", f"{about}{rows:,}", "; ".join(said)))
    found += source_rows(counts)
    if isinstance(classes := counts.get("classes"), Mapping):
        found.append(("classes", "", class_words(classes)))
    found += length_rows(plan, about)
    if words := too_long_words(counts):
        found.append(("too long for a row", "", about + words))
    if empty := number(counts.get("empty")):
        found.append(("empty", f"{about}{empty:,}", "left out, as nothing is learned in them"))
    return found


def source_rows(counts: Mapping[str, Any]) -> list[TableRow]:
    """What each of several sources gives to an epoch; none where there is one."""
    found: list[TableRow] = []
    for source in counts.get("sources") or ():
        rows, trained, share, passes = (
            number(source.get(key)) or 0 for key in ("rows", "trained", "share", "passes")
        )
        own = f"{rows:,} rows ({trained:,} trained tokens)"
        said = f"of an epoch's rows; its {own} are taken {passes:.3g} times in one"
        found.append((str(source.get("name")), percent(share), said))
    return found


def plan_title(plan: Mapping[str, Any]) -> str:
    """What a plan's tables are headed with."""
    revision = plan.get("revision")
    return "Plan" if revision in (None, 1) else f"Plan, revision {revision}: {plan.get('why', '')}"


def print_plan(plan: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print a row of plan.jsonl: what was chosen and why, what it will cost, and of what kinds."""
    stream = stream or sys.stdout
    choices, costs = plan_tables(plan)
    if choices:
        table(("Choice", "Value", "Why"), choices, title=plan_title(plan), stream=stream)
        stream.write("\n")
    table(
        ("Cost", "Predicted", ""), costs, title=None if choices else plan_title(plan), stream=stream
    )
    if ways := plan.get("exchanges"):
        stream.write("\n")
        table(("Exchange", "Step", "Waits", "Sent", "Faster"), _exchanges(ways), stream=stream)
    entries = (plan.get("prediction") or {}).get("table") or ()
    if entries:
        stream.write("\n")
        rows = [
            (entry.get("kind"), entry.get("phase"), quantity(entry.get("bytes"), "bytes"),
             entry.get("what"))
            for entry in entries if isinstance(entry, Mapping)
        ]  # fmt: skip
        table(("Kind", "Phase", "Bytes", "What"), rows, stream=stream)


def _exchanges(ways: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """Each way to exchange gradients: a step's time, what of it waits, and when it pays."""
    rows: list[TableRow] = []
    for way in ways:
        fields = dict(way.get("comm") or {"method": "as it is"})
        name = str(fields.pop("method"))
        named = ", ".join([name, *(f"{key} {value}" for key, value in fields.items())])
        below = number(way.get("break_even"))
        pays = "" if name == "as it is" else "at no rate"
        if way.get("always"):
            pays = "at every rate"
        elif below is not None:
            pays = f"below {8e-6 * below:,.4g} Mb/s"
        rows.append(
            (
                named + (" (the recipe's)" if way.get("here") else ""),
                quantity(way.get("step_seconds"), "seconds"),
                quantity(way.get("waited_seconds"), "seconds"),
                quantity(way.get("bytes"), "bytes"),
                pays,
            )
        )
    return rows


def print_proof(
    result: Mapping[str, Any], as_json: bool = False, stream: TextIO | None = None
) -> None:
    """Print a proof's result: lists of records as tables, the rest as lines, the verdict last.

    Columns in which nothing stands are left out.
    """
    from modicum.core.contracts.method import Against

    stream = stream or sys.stdout
    if as_json:
        print_json(dict(result), stream)
        return
    lines, records = [], []
    for name, value in result.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            records.append((name, value))
        elif name not in _LAST_WORDS and value not in (None, "", [], {}):
            lines.append((_words(name), _compact(value)))
    width = max((len(name) for name, _ in lines), default=0)
    stream.writelines(f"{name:<{width}}  {text}\n" for name, text in lines)
    for name, value in records:
        keys = dict.fromkeys(key for item in value for key in item)
        headers = [k for k in keys if any(item.get(k) not in (None, "") for item in value)]
        stream.write("\n")
        rows = [[item.get(key) for key in headers] for item in value]
        table([_words(key) for key in headers], rows, title=_words(name), stream=stream)
    stream.write("\n")
    if "claim_verdict" in result:
        against = Against(**result["against"])
        stream.write(f"claim verdict: {result['claim_verdict']}\nagainst: {against}\n")
    reason = result.get("reason")
    stream.write(f"verdict: {result.get('verdict')}{f' ({reason})' if reason else ''}\n")


_LAST_WORDS = ("claim_verdict", "against", "verdict", "reason")


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """Print strict JSON, indented: NaN and infinity become null, a path its text."""
    stream = stream or sys.stdout
    # JSON has a spelling of its own for letters that the stream lacks.
    plain_letters = not (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(finite(value), indent=2, ensure_ascii=plain_letters, default=str)
    print(text, file=stream)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _yes_or_no(value: Any) -> Any:
    return _cell(value) if isinstance(value, bool) else value


def _compact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(key))} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return _cell(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return _compact(value)
    # A cell is one line: neither a line break nor an escape code of a terminal may pass.
    return "".join(
        character if character.isprintable() else " " for character in " ".join(str(value).split())
    )


def _numeric(column: Sequence[str]) -> bool:
    """Whether all cells with something in them are numbers, with or without a unit."""
    filled = [cell for cell in column if cell]
    return bool(filled) and all(cell.lstrip("-−+")[:1].isdigit() for cell in filled)
