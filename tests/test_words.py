"""Prose and messages keep to the words of CONTRIBUTING.md, "Plain words".

Read are the docstrings, comments and texts of more than one word in the package and the benchmarks,
and the pages that people read. Code is free: what is in backticks or fences, and doctests' inputs.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src/modicum/**/*.py", "benchmarks/**/*.py", "docs/**/*.py")
PAGES = ("*.md", "docs/**/*.md", "promises.yaml", "src/modicum/report/**/*.j2")
EXCEPTIONS = ("docs/contributing/renamed.md",)  # it quotes the old names


class Passage(NamedTuple):
    """Prose and the line that it starts on."""

    line: int
    text: str


def read_table(contributing: str) -> dict[str, str]:
    """Word -> what to write instead, from the table under "Plain words"."""
    section = contributing.split("\n## Plain words\n")[1].split("\n## ")[0]
    table: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE):
        table |= dict.fromkeys(re.findall(r"`(.+?)`", row[0]), row[1])
    return table


def pattern_of(table: dict[str, str]) -> re.Pattern[str]:
    """Any word, also at a sentence's start and over a line's end; `DeAR` is no "dear"."""
    words = [f"[{word[0].upper()}{word[0]}]" + r"\s+".join(word[1:].split()) for word in table]
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(words)})\b")


def only_lines(match: re.Match[str]) -> str:
    """The line ends of what is taken out, so that lines keep their numbers."""
    return "\n" * match[0].count("\n")


def without_code(text: str) -> str:
    """The prose of a page or a docstring, its lines where they were."""
    text = re.sub(r"^ *```.*?^ *```", only_lines, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(?:>>>|\.\.\.) .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", only_lines, text, flags=re.DOTALL)


def comments(source: str) -> Iterator[Passage]:
    """Comments; those on consecutive lines are one."""
    found: list[Passage] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#")
        if found and found[-1].line + found[-1].text.count("\n") + 1 == line:
            before = found.pop()
            line, text = before.line, f"{before.text}\n{text}"
        found.append(Passage(line, text))
    yield from found


def texts(source: str) -> Iterator[Passage]:
    """String literals of more than one word: docstrings, messages, table headers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Passage(node.lineno, node.value)


def passages(name: str, content: str) -> Iterator[Passage]:
    if name.endswith(".py"):
        yield from comments(content)
        yield from texts(content)
    else:
        if name == "promises.yaml":  # where figures stand in results
            content = re.sub(r"(?<=, )key: [^}\n]*\}$", "}", content, flags=re.MULTILINE)
        yield Passage(1, content)


def findings(name: str, content: str, table: dict[str, str]) -> list[str]:
    """For each word of the table: file, line, the word, and what to write instead."""
    pattern, found = pattern_of(table), []
    for passage in passages(name, content):
        if not pattern.search(passage.text):
            continue  # most have none, and to take code out is slow
        prose = without_code(passage.text)
        for match in pattern.finditer(prose):
            line = passage.line + prose.count("\n", 0, match.start())
            word = " ".join(match[0].split())
            found.append(f'{name}:{line}: "{word}", write {table[word.lower()]}')
    return found


def table_of_contributing() -> dict[str, str]:
    return read_table((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_prose_and_messages_keep_to_plain_words() -> None:
    table = table_of_contributing()
    paths = {path for pattern in (*CODE, *PAGES) for path in ROOT.glob(pattern)}
    names = {path.relative_to(ROOT).as_posix() for path in paths} - set(EXCEPTIONS)
    assert {"README.md", "promises.yaml", "src/modicum/cli/app.py"} <= names
    found = [
        finding
        for name in sorted(names)
        for finding in findings(name, (ROOT / name).read_text(encoding="utf-8"), table)
    ]
    assert not found, "\n".join(found)


def test_words_are_found_where_people_read_them() -> None:
    source = '''"""A module.

The whole of it.
"""

STATE = "whole"


def stop(name: str) -> str:
    # An update that is put
    # off.
    return f"{name} goes on"  # Beside it
'''
    table = {"whole": "full", "put off": "deferred", "goes on": "resumes", "beside": "next to"}
    assert findings("a.py", source, table) == [
        'a.py:10: "put off", write deferred',
        'a.py:12: "Beside", write next to',
        'a.py:3: "whole", write full',
        'a.py:12: "goes on", write resumes',
    ]


def test_code_is_free() -> None:
    page = """The `whole` ``whole`` of DeAR.

```python
whole = dear
```

>>> whole(dear)
A dear one.
"""
    table = {"whole": "full", "dear": "expensive"}
    assert findings("a.md", page, table) == ['a.md:8: "dear", write expensive']


def test_the_table_is_read_from_the_contributing_page() -> None:
    table = table_of_contributing()
    assert table["beside"] == "next to, in addition to"
    assert table["go on"] == table["goes on"] == "resumes, continues"
