"""The pages whose code is run: every ```python block of a page, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[1] / "docs"
RUN = ("tutorials/python.md",)


def blocks(page: str) -> str:
    """The page's code, every line where it is on the page, so that a failure names its line."""
    lines, inside = [], False
    for line in page.split("\n"):
        fence = re.match(r"```(\w*)", line)
        inside = bool(fence and fence[1] == "python") or (inside and not fence)
        lines.append(line if inside and not fence else "")
    return "\n".join(lines)


def test_only_what_is_fenced_as_python_is_run() -> None:
    page = "text\n```python\nx = 1\n```\nmore\n```py\ny\n```\n```bash\nz\n```\n"
    assert blocks(page).split() == ["x", "=", "1"]
    assert blocks(page).split("\n")[2] == "x = 1"


@pytest.mark.dear
@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = PAGES / name
    code = compile(blocks(file.read_text(encoding="utf-8")), str(file), "exec")
    exec(code, {"__name__": "page"})
