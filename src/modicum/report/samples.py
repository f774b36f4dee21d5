"""What the model wrote on the way, prompt by prompt."""

from __future__ import annotations

from typing import Any

from modicum.core.files import JsonObject
from modicum.report.numbers import number

_CHARACTERS = 6000  # of one sample that are shown
_MOST = 30  # samples of one prompt


def samples(rows: list[JsonObject]) -> list[dict[str, Any]]:
    """For each prompt its samples over the steps, and how many of them are left out.

    Of more than thirty, the first, the last, and others evenly spread between them.
    """
    by_prompt: dict[str, dict[float, str]] = {}
    for row in rows:
        step, prompt, text = number(row.get("step")), row.get("prompt"), row.get("text")
        if step is not None and isinstance(prompt, str) and isinstance(text, str):
            by_prompt.setdefault(prompt, {})[step] = text
    shown = []
    for prompt, texts in by_prompt.items():
        steps = _spread(sorted(texts))
        pieces = []
        for step in steps:
            # A model's answer may or may not repeat the prompt; the page shows it once, dimmed.
            text = texts[step].removeprefix(prompt)
            more = len(text) > _CHARACTERS
            pieces.append({"step": step, "text": text[:_CHARACTERS], "truncated": more})
        shown.append({"prompt": prompt, "pieces": pieces, "left_out": len(texts) - len(steps)})
    return shown


def _spread(steps: list[float]) -> list[float]:
    if len(steps) <= _MOST:
        return steps
    places = {round(place * (len(steps) - 1) / (_MOST - 1)) for place in range(_MOST)}
    return [steps[place] for place in sorted(places)]
