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
    run: Path, against: Path | None, *, prompts: int, tokens: int, as_json: bool
) -> None:
    """Verify what a run exported.

    Raises:
        InputError: there is nothing to verify.
        FoundWanting: something computes, or writes, something else than what was trained.
    """
    from modicum.verify import verify_export

    done = verify_export(run, against=against, prompts=prompts, tokens=tokens, progress=_progress())
    _show(done, ("Step", "Error", "Allowed", ""), _export_row, as_json=as_json)


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
    text = "the same text" if check["same_text"] else "another text"
    said = f"{text}; {check['dtype']}, {check['where']}"
    return check["check"], f"{check['error']:.2g}", f"{check['allowed']:.2g}", said


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
