"""Recipes as text: YAML in and out, `--set`, and the line of every field for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError, nearest
from modicum.core.files import read_bytes
from modicum.core.folder_words import holds
from modicum.recipe import Recipe, assign
from modicum.recipe.paths import anchored
from modicum.recipe.training import LENGTHS, WARMUPS

SHIPPED = (
    Path(__file__).resolve().parent / "recipes",  # in an installed wheel
    Path(__file__).resolve().parents[2] / "recipes",  # in a checkout
)


# Far more than a recipe ever has. A few lines of aliases of aliases can expand to any number of
# values, and a file of any size is one that was given by mistake.
LARGEST_BYTES, MOST_VALUES = 1 << 18, 100_000
# Of a field with its sections; each value below it has a name that begins so.
_LONGEST_FIELD = 1000
# What a recipe says behind a path.
_LOOKED_AT = 1 << 16  # characters of a file that may be a recipe
_MAKER = re.compile(r"\s# made by: (\S.*?)\s*$")


def shipped() -> dict[str, Path]:
    """The recipes that come with modicum, by name."""
    return {
        file.stem: file
        for folder in reversed(SHIPPED)
        if folder.is_dir()
        for file in sorted(folder.glob("*.yaml"))
    }


def locate(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that ships with modicum.

    Raises:
        InputError: neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        inner = path / "recipe.yaml"
        own = f" (this one's is {inner})" if inner.is_file() else ""
        hint = own or holds(path, (".yaml", ".yml"), "recipe")
        raise InputError(f"a recipe is a file, and this is a folder{hint}", file=path)
    known = shipped()
    if path.name == str(name) and path.stem in known:
        return known[path.stem]
    raise InputError(
        "no such recipe: neither a file nor one that ships with modicum",
        value=str(name),
        allowed="a path, which `modicum init` writes, or " + ", ".join(known),
        candidates=[*_next_to(path), *known],
    )


def _may_be_recipe(path: Path) -> bool:
    """Whether a file begins a section of a recipe."""
    with path.open(encoding="utf-8", errors="replace") as file:
        sections = {line.partition(":")[0] for line in file.read(_LOOKED_AT).splitlines()}
    return not sections.isdisjoint(Recipe.model_fields)


def _next_to(path: Path) -> list[str]:
    """The file next to where a recipe was looked for whose name is nearest, if one is near."""
    try:
        files = [each for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
        names = [each.name for each in files if each.is_file() and _may_be_recipe(each)]
    except OSError:
        return []
    # By the name alone: in a long path any two files are near each other.
    near = nearest(path.name, sorted(names))
    return [] if near is None else [str(path.parent / near)]


def load(name: str | Path, overrides: Iterable[str] = (), folder: Path | None = None) -> Recipe:
    """Read a recipe and apply `--set` overrides (`training.steps=10`, values in YAML).

    Args:
        folder: what relative paths in it are made absolute from; None leaves them.

    Raises:
        InputError: with file, line, field, value, what is allowed, and the nearest match.
    """
    values, written = _read(name, overrides)
    if folder is not None:
        values = anchored(values, folder)
    try:
        return Recipe(**values)
    except InputError as error:
        if error.file is not None:  # a plugin's
            raise
        raise written.located(error) from None


@contextmanager
def places(name: str | Path, overrides: Iterable[str] = ()) -> Iterator[None]:
    """Errors in the block about a recipe's field say where that recipe writes it.

    Where a file that it names is not there, they name the command that makes it, if the recipe
    does: `path: rows.jsonl # made by: COMMAND`.

    Raises:
        InputError: as the block, with the file and the line.
    """
    _, written = _read(name, overrides)
    try:
        yield
    except InputError as error:
        told = written.fixed(error)
        raise (
            told if told.file is not None or told.field is None else written.located(told)
        ) from None


def written(name: str | Path, overrides: Iterable[str], field: str) -> str | None:
    """Where a recipe's field is written: `r.yaml:3`, or the override; None: nowhere.

    Raises:
        InputError: as `load`.
    """
    values, known = _read(name, overrides)
    if not _says(values, field):  # also where an override has replaced what the file says
        return None
    sections = {field, *_parents(field)}
    for place, override in reversed(known.overrides.items()):
        if place in sections:  # the last that sets it, or all of its section
            return override
    line = known.lines.get(field)
    return None if line is None else f"{known.path}:{line}"


def _says(values: Any, field: str) -> bool:
    """Whether nested values have a dotted field."""
    for name in field.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


@dataclass(frozen=True)
class _Written:
    """Where a recipe's fields are written: lines of its file, and overrides.

    Args:
        makers: of fields with a path, the command that makes what lies there.
    """

    path: Path
    lines: dict[str, int]
    overrides: dict[str, str]
    makers: dict[str, str]

    def fixed(self, error: InputError) -> InputError:
        """The error with the command that makes a file which is not there, where one is known."""
        command, missing = self.makers.get(error.field or ""), error.file or error.value
        if command is None or error.field in self.overrides or missing is None:
            return error
        if Path(str(missing)).expanduser().exists():
            return error
        return error.fixed_by(f"`{command}` makes it")

    def located(self, error: InputError) -> InputError:
        """The error with the nearest place that was written: its own, or its section's."""
        known = error.field or ""
        for field in (known, *_parents(known)):
            if field in self.overrides:
                return error.located(file=self.overrides[field])
            if field in self.lines:
                return error.located(file=self.path, line=self.lines[field])
        within = [text for field, text in self.overrides.items() if field.startswith(f"{known}.")]
        return error.located(file=within[0] if within else self.path)


def _read(name: str | Path, overrides: Iterable[str]) -> tuple[dict[str, Any], _Written]:
    """A recipe's values with the overrides in them, and where each is written."""
    path = locate(name)
    text = text_of(path)
    values, lines = parse(text, path)
    spelled: dict[str, str] = {}
    given = overridden(overrides, spelled)
    _forget_replaced(values, given)
    for field, value in given.items():
        try:
            assign(values, field, value)
        except InputError as error:
            raise error.located(file=spelled[field]) from None
    rows = text.splitlines()
    comments = ((field, _MAKER.search(rows[line - 1])) for field, line in lines.items())
    makers = {field: found[1] for field, found in comments if found is not None}
    return values, _Written(path, lines, spelled, makers)


def _forget_replaced(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Leave out the file's length of the run, and its warm-up, where an override says another."""
    section = values.get("training")
    if not isinstance(section, dict):
        return
    for names in (LENGTHS, WARMUPS):
        if any(given.get(f"training.{name}") for name in names):
            for name in names:
                section.pop(name, None)


def overridden(overrides: Iterable[str], spelled: dict[str, str] | None = None) -> dict[str, Any]:
    """The values of `--set` overrides by their field, dotted.

    Args:
        spelled: takes how each field was written.

    Raises:
        InputError: one is no `FIELD=VALUE`, or its value is no YAML.

    >>> overridden(["training.steps=10"])
    {'training.steps': 10}
    """
    values: dict[str, Any] = {}
    spelled = {} if spelled is None else spelled
    for override in overrides:
        field, separator, value = override.partition("=")
        if not separator or not field.strip():
            raise InputError("expected FIELD=VALUE", field="--set", value=override)
        field = field.strip()
        values.pop(field, None)  # one that is given again is the last of all
        spelled.pop(field, None)
        spelled[field] = f"--set {override}"
        values[field], _ = parse(value, spelled[field], mapping=False)
    return values


def text_of(path: Path) -> str:
    """The text of a recipe's file.

    Raises:
        InputError: it is no UTF-8, is too large, or cannot be read.
    """
    raw = read_bytes(path, LARGEST_BYTES + 1)
    if len(raw) > LARGEST_BYTES:
        raise InputError(
            f"this is no recipe: it has more than {LARGEST_BYTES // 1024} KiB", file=path
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", file=path) from None


def parse(text: str, source: str | Path, *, mapping: bool = True) -> tuple[Any, dict[str, int]]:
    """YAML text as plain values, and the line of each dotted field.

    Raises:
        InputError: not YAML, a key twice, a tag, too many values, or (with `mapping`) no sections
            at all.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=_loader())
        lines: dict[str, int] = {}
        value = None if node is None else _construct(node, "", lines, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"not valid YAML: {error.problem or error.context}"
        line = mark.line + 1 if mark else None
        raise InputError(problem, file=source, line=line) from None
    except yaml.reader.ReaderError as error:
        problem = f"a character that no text has (U+{error.character:04X})"
        line = text.count("\n", 0, error.position) + 1
        raise InputError(problem, file=source, line=line) from None
    except RecursionError:
        raise InputError("nested too deeply, or within itself", file=source) from None
    if mapping and not isinstance(value, dict):
        if value is None:
            return {}, lines
        raise InputError("a recipe is a list of sections (`training:` ...)", file=source, line=1)
    return value, lines


def dump(recipe: Recipe) -> str:
    """The recipe as YAML, every field spelled out."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes the words that the reader here would take for numbers."""

    for tag, pattern, first in _NUMBERS:
        Dumper.add_implicit_resolver(tag, pattern, first)
    plain = recipe.plain()
    text: str = yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in "\x85\u2028\u2029"):
        # PyYAML writes these as they are and reads them as the ends of lines.
        text = yaml.dump(plain, Dumper=Dumper, sort_keys=False)
    return text


def _parents(field: str) -> list[str]:
    parts = field.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


# Numbers as YAML 1.2 has them: tag, pattern, first characters.
_NUMBERS = (
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|nan)$"),
        list("-+.0123456789"),
    ),
)
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_SCALARS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


def _construct(node: Any, path: str, lines: dict[str, int], source: str | Path) -> Any:
    import yaml

    if len(lines) > MOST_VALUES:
        raise InputError(f"expands to more than {MOST_VALUES} values", file=source)

    if node.tag not in (_COLLECTIONS if isinstance(node, yaml.CollectionNode) else _SCALARS):
        line = node.start_mark.line + 1
        raise InputError(f"the tag {node.tag} means nothing here", file=source, line=line)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            field = f"{path}.{key}" if path else str(key)
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError("a key must be a word", file=source, line=line)
            if len(field) > _LONGEST_FIELD:
                problem = f"a key with its sections has more than {_LONGEST_FIELD} characters"
                raise InputError(problem, file=source, line=line)
            if key in result:
                raise InputError("this key stands here twice", file=source, line=line, field=field)
            lines[field] = line
            result[key] = _construct(value_node, field, lines, source)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[f"{path}.{index}"] = item.start_mark.line + 1
            items.append(_construct(item, f"{path}.{index}", lines, source))
        return items
    try:
        return _loader()("").construct_object(node)
    except (ValueError, LookupError, AttributeError):  # the ways in which PyYAML gives up
        line, kind = node.start_mark.line + 1, node.tag.rsplit(":", 1)[-1]
        raise InputError(
            f"cannot be read as !!{kind}", file=source, line=line, field=path, value=node.value
        ) from None


@cache
def _loader() -> Any:
    """PyYAML's safe loader, reading numbers as YAML 1.2 does.

    `1e-3` is a number, `yes` and `1:30` are words, and `010` is no eight.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """With resolvers of its own."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern, first in _NUMBERS:
        Loader.add_implicit_resolver(tag, pattern, first)
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
    )
    return Loader
