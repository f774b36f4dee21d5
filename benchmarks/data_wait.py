"""Which part of a step waits for its rows: the demo's two parts, and a mixture of sources.

The demo's recipes are run with fewer steps; which rows a step has and how they are made does not
depend on how many follow. The mixture trains the demo's model on running text and on short
examples that share rows, which are the most expensive ones to make.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import alone, say, write_result

STEPS = 60


def examples(folder: Path) -> tuple[Path, Path]:
    """A folder of running text, and a file of 4,000 short examples with prompts."""
    texts, rows = folder / "texts", folder / "rows.jsonl"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"Sentence {number} of a long text. " * 400)
    pairs = ({"prompt": f"What is {n} + 1? ", "completion": f"It is {n + 1}."} for n in range(4000))
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return texts, rows


def share_of(recipe: str, out: Path, *changes: str) -> float:
    """Train with `changes` to a recipe; the part of its steps' time that waited for rows."""
    command = [sys.executable, "-m", "modicum", "train", recipe, "--out", str(out)]
    for change in (f"training.steps={STEPS}", *changes):
        command += ["--set", change]
    subprocess.run([*command, "--progress", "lines"], check=True, stdout=sys.stderr)
    share: float = json.loads((out / "run.json").read_text(encoding="utf-8"))["data_wait"]
    return share


def main() -> None:
    """Run all three, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with alone(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts, rows = examples(folder)
        base = folder / "pretrain"
        sources = f"[{{path: {texts}, weight: 1}}, {{path: {rows}, weight: 1}}]"
        shares = {
            "demo-pretrain": share_of("demo-pretrain", base),
            "demo-adapt": share_of("demo-adapt", folder / "adapt", f"model.path={base}"),
            "mixture": share_of("demo-pretrain", folder / "mix", f"data.sources={sources}"),
        }
    demo = max(shares["demo-pretrain"], shares["demo-adapt"])
    say(json.dumps(shares, indent=2))
    write_result("data_wait", {"demo": demo, "shares": shares}, {"steps": STEPS})


if __name__ == "__main__":
    main()
