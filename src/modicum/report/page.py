"""Puts a page together: one file with its style and scripts inside, which fetches nothing.

A policy in the page's head lets the browser run the scripts that were put in, known by their
digests, and nothing else: no text of a run folder can become one.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from modicum.core.files import JsonObject
from modicum.core.plain_values import finite
from modicum.report import numbers, plots
from modicum.report.charts import payload
from modicum.report.folder import FolderContents
from modicum.report.overlay import names, overlay
from modicum.report.view import view
from modicum.report.words import moment, visible

_STYLES = ("uPlot.min.css", "style.css")
_SCRIPTS = (
    ("uPlot.iife.min.js",),
    ("smooth.js", "format.js", "curves.js", "tooltip.js", "charts.js", "controls.js", "live.js"),
)


def render(runs: Sequence[FolderContents], live: JsonObject | None = None) -> str:
    """The page, a function of the folders' content and of nothing else.

    Args:
        runs: one, or several that are laid over each other.
        live: `version` and `parts` of the files, if a server is behind the page, which the page
            then asks for what is new.
    """
    shown: dict[str, Any] = view(runs[0]) if len(runs) == 1 else overlay(runs)
    drawn = payload(runs) | {"live": live}
    for of_run, name in zip(drawn["runs"], names(runs), strict=True):
        of_run["name"] = name
    template = "run.html.j2" if len(runs) == 1 else "runs.html.j2"
    scripts = [_joined(names) for names in _SCRIPTS]
    return page_of(template, shown, scripts, drawn, live=live is not None)


def page_of(
    template: str,
    shown: JsonObject,
    scripts: Sequence[str] = (),
    drawn: JsonObject | None = None,
    *,
    live: bool = False,
) -> str:
    """A page of a template that stands in the frame of all pages.

    Args:
        shown: what the template shows.
        scripts: that the page runs.
        drawn: what they draw.
        live: whether they may ask the server behind the page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("modicum.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader
    )
    environment.filters.update(
        quantity=numbers.quantity,
        per=numbers.per,
        short=numbers.short,
        percent=numbers.percent,
        signed=lambda value: numbers.percent(value, signed=True),
        visible=visible,
        moment=moment,
        colour=plots.colour,
        phase=plots.phase_title,
        spelled=spelled,
    )
    return (
        environment.get_template(template).render(
            shown,
            style=_joined(_STYLES),
            scripts=scripts,
            licence=_asset("uPlot.LICENSE"),
            policy=policy(scripts, live=live),
            payload=harmless_json(drawn or {}),
        )
        + "\n"
    )


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """What the page's browser may do: the Content-Security-Policy."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = allowed or "'none'"
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def harmless_json(value: Any) -> str:
    """Strict JSON in which nothing reads as markup."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def spelled(value: Any) -> str:
    """A recipe's value as YAML would spell it, on one line."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _joined(names: Sequence[str]) -> str:
    return "\n".join(_asset(name) for name in names)


@cache
def _asset(name: str) -> str:
    return (importlib.resources.files("modicum.report") / "assets" / name).read_text("utf-8")
