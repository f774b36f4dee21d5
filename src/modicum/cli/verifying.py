"""What people see of `modicum verify`: a row for each check, and every finding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum import recipe_yaml
from modicum.cli.tables import print_json, table
from modicum.core.errors import FoundWanting, InputError
from modicum.report.numbers import percent

if TYPE_CHECKING:
    from modicum.verify import Verification


def check_data(
    recipe: str, overrides: Sequence[str], limits: Sequence[str], *, as_json: bool
) -> None:
    """Verify a recipe's data.

    Args:
        limits: `NAME=SHARE`, as `--limit` has them.

    Raises:
        InputError: recipe, data or a limit is wrong.
        FoundWanting: a limit is not kept.
    """
    from modicum.verify import DataLimits, verify_data

    asked = DataLimits(**dict(_limit(text, DataLimits.names()) for text in limits))
    with recipe_yaml.places(recipe, overrides):
        loaded = recipe_yaml.load(recipe, overrides).anchored()
        done = verify_data(loaded, asked, progress=_progress())
    _show(done, ("Check", "Count", "Share", "Limit"), _data_row, as_json=as_json)


def check_export(
    run: Path, against: Path | None, *, prompts: int | None, tokens: int, as_json: bool
) -> None:
    """Verify what a run exported.

    Raises:
        InputError: there is nothing to verify.
        FoundWanting: something computes, or writes, something else than what was trained.
    """
    from modicum.verify import verify_export

    done = verify_export(run, against=against, prompts=prompts, tokens=tokens, progress=_progress())
    _show(done, ("Step", "Error", "Allowed", ""), _export_row, as_json=as_json)


def check_resume(
    run: Path, *, steps: int, ranks: int | None, tolerance: float | None, as_json: bool
) -> None:
    """Verify that a run resumes.

    Raises:
        InputError: there is no run, or it cannot be continued here.
        FoundWanting: what follows the restoring is not what would have followed.
    """
    from modicum.verify import verify_resume

    done = verify_resume(
        run, steps=steps, ranks=ranks, tolerance=tolerance, say=_say, progress=_progress()
    )
    _show(done, ("Check", ""), _resume_row, as_json=as_json)


def reproduce_run(
    run: Path,
    out: Path | None,
    *,
    steps: int | None,
    ranks: int | None,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Make a run anew, and compare.

    Raises:
        InputError: there is no run, or it cannot be made anew here.
        FoundWanting: the new one is another.
    """
    from modicum.verify import reproduce

    done = reproduce(
        run, out, steps=steps, ranks=ranks, tolerance=tolerance, say=_say, progress=_progress()
    )
    _show(done, ("Compared", ""), _reproduced_row, as_json=as_json)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _limit(text: str, names: Sequence[str]) -> tuple[str, float]:
    name, separator, value = text.partition("=")
    try:
        share = float(value)
    except ValueError:
        separator = ""
    if not separator:
        raise InputError("expected NAME=SHARE", field="--limit", value=text, allowed="0 to 1")
    if name not in names:
        allowed = ", ".join(names)
        problem = "no such limit"
        raise InputError(problem, field="--limit", value=name, allowed=allowed, candidates=names)
    return name, share


def _progress() -> Callable[[str, int, int | None], None]:
    """Says on a terminal what is being done, each once."""
    said: set[str] = set()

    def tell(name: str, done: int, total: int | None) -> None:
        if name not in said and sys.stderr.isatty():
            said.add(name)
            print(f"{name} ...", file=sys.stderr, flush=True)

    return tell


def _data_row(check: dict[str, Any]) -> tuple[str, ...]:
    if "origin" in check:
        words = {"other": "the recipe's, NOT the model's", "default": "chatml, by default"}
        own = {"model": "the model's own", "same": "the recipe's, as the model's own is"}
        words |= own | {"recipe": "the recipe's; the model has none"}
        return "chat template", "", words[check["origin"]], ""
    count = f"{check['count']:,} of {check['of']:,}"
    return check["check"], count, percent(check["share"]), percent(check["limit"])


def _export_row(check: dict[str, Any]) -> tuple[str, ...]:
    if "error" not in check:
        said = check.get("skipped") or check.get("of")
        count = check.get("count")
        return check["check"], "", "", f"{count} of the {said} rows" if count else str(said or "")
    if "other_classes" in check:
        others = check["other_classes"]
        same = f"{others} of another class" if others else "the same classes"
    else:
        same = "the same text" if check["same_text"] else "another text"
    said = f"{same}; {check['dtype']}, {check['where']}"
    return check["check"], f"{check['error']:.2g}", f"{check['allowed']:.2g}", said


def _resume_row(check: dict[str, Any]) -> tuple[str, ...]:
    name = check["check"]
    if name == "steps":
        said = f"{check['begin'] + 1} to {check['end']}, stopped and restored after {check['stop']}"
    elif name == "ranks":
        said = f"{check['run']}, and {check['restored']} after the restoring"
    elif name == "compared":
        within = "to the bit" if check["exact"] else f"within {check['tolerance']:g}"
        said = f"{check['entries']:,} entries of the state before each update, {within}"
    else:
        within = "to the bit" if check["exact"] else f"within {check['tolerance']:g}"
        said = f"{check['steps']} losses of metrics.jsonl, at most {check['largest']:.2g} apart"
        said += f"; {within}"
    return name, said


def _reproduced_row(check: dict[str, Any]) -> tuple[str, ...]:
    name = check["check"]
    if name == "environment":
        return name, "; ".join(check["differs"]) or "as it was"
    if name == "folder":
        return "made anew in", check["path"]
    if name == "weights":
        if check["step"] is None:
            return name, f"not compared: the run keeps checkpoints of these steps: {check['kept']}"
        said = f"{check['equal']:,} of {check['entries']:,} entries equal after {check['step']}"
        return name, f"{said}, at most {check['largest']:.2g} apart"
    said = f"{check['equal']:,} of {check['rows']:,} rows equal to the bit"
    if check["first"] is not None:
        said += f"; the first other is of step {check['first']}"
        said += f", losses are at most {check['largest']:.2g} apart"
    return name, said


def _show(
    done: Verification,
    headers: Sequence[str],
    row: Callable[[dict[str, Any]], tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    """Print a verification.

    Raises:
        FoundWanting: it has findings.
    """
    if as_json:
        print_json(done.as_json())
    else:
        table(headers, [row(check) for check in done.checks])
        for finding in done.findings:
            print(f"FOUND {finding}")
    if not done.passed:
        first = done.findings[0]
        raise FoundWanting(
            f"{len(done.findings)} thing(s) found, the first: {first.what} ({first.where})"
        )
    if not as_json:
        print("passed: nothing was found")
