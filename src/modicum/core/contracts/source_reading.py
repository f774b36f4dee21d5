"""What can be read of a Python file without running it: classes, literals, annotated fields.

Importing torch takes seconds, and a stranger's file must not run because somebody lists it. Names
in annotations and literals are looked up among the few of `READABLE`, whose modules import nothing
heavy; nothing is called but what makes a value of literals.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin

from modicum.core.errors import InputError, ModicumError, clipped
from modicum.core.files import read_bytes

# By module, types that a file may name, and what it may also call, which makes a value of literals.
# Nothing here imports, runs text as code, or calls what it is given.
_TYPES: dict[str, set[str]] = {
    "typing": {
        *("Annotated", "Any", "ClassVar", "Dict", "Final", "FrozenSet", "List", "Literal"),
        *("Mapping", "Optional", "Sequence", "Set", "Tuple", "Union"),
    },
    "pydantic": {
        *("FiniteFloat", "NegativeFloat", "NegativeInt", "NonNegativeFloat", "NonNegativeInt"),
        *("NonPositiveFloat", "NonPositiveInt", "PositiveFloat", "PositiveInt"),
        *("StrictBool", "StrictFloat", "StrictInt", "StrictStr"),
    },
    "modicum.core.contracts.method": {
        *("Betas", "CountByStep", "Names", "NonNegativeFloat", "OddQuintic", "PositiveFloat"),
        *("PositiveInt", "PowerIterations", "Probability", "Seed", "Strings"),
    },
}
_MAKERS: dict[str, set[str]] = {
    "pydantic": {"AllowInfNan", "Field", "Strict", "StringConstraints"},
    "annotated_types": {
        *("Ge", "Gt", "Interval", "Le", "Len", "Lt", "MaxLen", "MinLen", "MultipleOf"),
    },
    "modicum.core.contracts.method": {"Against", "Info"},
    "modicum.core.contracts.search": {
        *("IntegerRange", "LinearRange", "LogRange", "SearchChoice", "SearchTable"),
    },
}
_MODULES = {**_TYPES, **_MAKERS}
READABLE = {name: _TYPES.get(name, set()) | _MAKERS.get(name, set()) for name in _MODULES}
# Of what an expression may be made.
_LITERAL = (
    *(ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.keyword),
    *(ast.Subscript, ast.BinOp, ast.UnaryOp, ast.expr_context, ast.operator, ast.unaryop),
)
# Operators that can make much of little: a number of any length, a text that fills the memory.
_GROWING = (ast.Pow, ast.LShift, ast.Mult, ast.Mod)
_MOST_BITS = 4096  # of what they make
SOURCES = Path(__file__).resolve().parents[2]
# How the `__init__` of an optimizer begins; its hyper-parameters are the keywords that follow.
OPTIMIZER = ("self", "params", "lr")
# Fields under `Args:` in a docstring, and the beginning of what is said of them.
ARGUMENT = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")
_PLAIN: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict)
}
DeclaredFields = dict[str, tuple[Any, Any]]


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        InputError: it is not valid Python, with the line.
    """
    return _parsed(file, read_bytes(file))


@functools.lru_cache(maxsize=64)
def _parsed(file: Path, source: bytes) -> ast.Module:
    try:
        return ast.parse(source, filename=str(file))
    except SyntaxError as error:
        problem = f"not valid Python: {error.msg}"
        raise InputError(problem, file=file, line=error.lineno) from None
    except (ValueError, RecursionError, MemoryError) as error:  # as Python refuses some bytes
        raise InputError(f"not valid Python: {error}", file=file) from None


def assigned(node: ast.ClassDef, name: str) -> ast.expr | None:
    """What the body of a class assigns to a name."""
    for item in node.body:
        if not isinstance(item, ast.Assign | ast.AnnAssign):
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value
    return None


def inherited(file: Path, node: ast.ClassDef, name: str) -> tuple[Path, ast.expr] | None:
    """What a class has under a name, and the file that says it: its own, or first a base's."""
    if (value := assigned(node, name)) is not None:
        return file, value
    found = (inherited(*base, name) for base in _bases(file, node, parse(file)))
    return next((each for each in found if each is not None), None)


def names(tree: ast.Module) -> dict[str, Any]:
    """What annotations and literals may refer to: imports of what is readable."""
    known = dict(_PLAIN)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in READABLE:
            source, readable = importlib.import_module(node.module), READABLE[node.module]
            # What is not there is unknown where it is used, with the line.
            known |= {
                a.asname or a.name: getattr(source, a.name)
                for a in node.names
                if a.name in readable
            }
    return known


def evaluate(node: ast.expr | None, known: dict[str, Any], file: Path) -> Any:
    """The value of an expression of literals, known names, and calls of what makes values.

    Raises:
        InputError: it cannot be known without running the file, with the line.
    """
    if node is None:
        return None
    try:
        _check_literal(node, known)
        code = compile(ast.Expression(node), str(file), "eval")
        return eval(code, {**known, "__builtins__": {}})
    except ModicumError as error:
        raise InputError(str(error), file=file, line=node.lineno) from None
    except Exception as error:
        readable = ", ".join(sorted(READABLE))
        raise InputError(
            f"cannot be read without running the file ({error}); use literals, and types from "
            f"{readable}",
            file=file,
            line=node.lineno,
        ) from None


def _check_literal(node: ast.expr, known: dict[str, Any]) -> None:
    """Refuse what could reach anything that runs: attributes, other calls, functions, loops.

    Raises:
        ValueError: with the part that is no literal.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            called = part.func.id  # one that is not known is reported as such
            fits = called not in known or any(known[called] is each for each in _makers())
        elif isinstance(part, ast.BinOp) and isinstance(part.op, _GROWING):
            fits = _bits(part) <= _MOST_BITS
        else:
            fits = isinstance(part, _LITERAL)
        if not fits:
            raise ValueError(f"{clipped(ast.unparse(part), 60)} is no literal")


def _bits(part: ast.expr) -> float:
    """How many bits a number has at most that is made of numbers; infinity: it is made of more."""
    if isinstance(part, ast.UnaryOp):
        return 1 + _bits(part.operand)
    if isinstance(part, ast.BinOp):
        left, right = _bits(part.left), _bits(part.right)
        raised = isinstance(part.op, ast.Pow | ast.LShift)
        return left * 2.0 ** min(right, 64) if raised else left + right
    if not isinstance(part, ast.Constant) or not isinstance(part.value, int | float):
        return math.inf
    return max(1, part.value.bit_length()) if isinstance(part.value, int) else 1


@functools.cache
def _makers() -> tuple[Any, ...]:
    """What a file may call, by whatever name it has there."""
    found = (
        getattr(importlib.import_module(module), name)
        for module, makers in _MAKERS.items()
        for name in makers
    )
    return (*_PLAIN.values(), *found)


def _kind(node: ast.expr | None, known: dict[str, Any], file: Path) -> Any:
    """The type that an annotation says.

    Raises:
        InputError: as `evaluate`; or it is text, in part, which pydantic would run as code.
    """
    kind = evaluate(node, known, file)
    if node is not None and _has_text(kind):
        problem = "a type in quotes cannot be read without running the file; leave the quotes out"
        raise InputError(problem, file=file, line=node.lineno)
    return kind


def _has_text(kind: Any) -> bool:
    """Whether a type, or one that it is made of, is text.

    >>> [_has_text(kind) for kind in (list["int"], Literal["a"] | None)]
    [True, False]
    """
    if isinstance(kind, str | ForwardRef):
        return True
    if get_origin(kind) is Literal:
        return False
    parts = get_args(kind)
    return any(map(_has_text, parts[:1] if get_origin(kind) is Annotated else parts))


def fields(file: Path, node: ast.ClassDef) -> DeclaredFields:
    """The fields of a method's class, each with its type and its default (`...`: it has none).

    They are the keywords of an optimizer's `__init__`, and else the annotated names of the class
    and, first, of its bases within modicum or the file.
    """
    signature = _signature(file, node)
    if signature is not None:
        return _keywords(*signature)
    tree = parse(file)
    known = names(tree)
    found: DeclaredFields = {}
    for base in _bases(file, node, tree):
        found |= fields(*base)
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if ast.unparse(item.annotation).startswith("ClassVar"):
            continue
        kind = _kind(item.annotation, known, file)
        default = ... if item.value is None else evaluate(item.value, known, file)
        found[item.target.id] = (kind, default)
    return found


def meanings(file: Path, node: ast.ClassDef) -> dict[str, str]:
    """What the docstring of a class, or else of a base, says of each field under `Args:`.

    Backticks and sentences are as written; a line's end is a space.
    """
    inherited: dict[str, str] = {}
    for base in _bases(file, node, parse(file)):
        inherited |= meanings(*base)
    found = dict(inherited)
    _, _, after = (ast.get_docstring(node) or "").partition("\nArgs:\n")
    section = re.match(r"(?: {4}.*\n?|\n(?= {4}))*", after)
    named: list[str] = []
    for line in (section[0] if section else "").splitlines():
        if entry := ARGUMENT.match(line):
            named = entry[1].split(", ")
            found |= dict.fromkeys(named, entry[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in named}
    for name, text in inherited.items():  # "see `Adapter`": what is said there
        refers = re.match(r"see `\w+`", found[name])
        if refers:
            found[name] = text.removesuffix(".") + found[name][refers.end() :]
    return found


def description(node: ast.ClassDef) -> list[str]:
    """The paragraphs and list items of a class's docstring before its sections, a line each."""
    text = re.split(r"\n(?:[A-Z]\w+:\n|Source: |>>> )", ast.get_docstring(node) or "")[0]
    _, *paragraphs = re.split(r"\n\n|\n(?=- )", text.strip())
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def _signature(file: Path, node: ast.ClassDef) -> tuple[Path, ast.FunctionDef] | None:
    """The `__init__` of an optimizer, its own or that of a base; None for other classes."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            first = tuple(argument.arg for argument in item.args.args)
            return (file, item) if first == OPTIMIZER else None
    inherited = (_signature(*base) for base in _bases(file, node, parse(file)))
    return next((found for found in inherited if found is not None), None)


def _keywords(file: Path, function: ast.FunctionDef) -> DeclaredFields:
    known, arguments = names(parse(file)), function.args
    return {
        argument.arg: (
            _kind(argument.annotation, known, file),
            ... if default is None else evaluate(default, known, file),
        )
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def _bases(file: Path, node: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The bases of a class that are in the file or in modicum, `Method` itself left out."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id != "Method":
            found = _find_class(base.id, file, tree)
            if found is not None:
                yield found


def _find_class(name: str, file: Path, tree: ast.Module) -> tuple[Path, ast.ClassDef] | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("modicum."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = (node.module or "").split(".")[1:]
                    target = SOURCES.joinpath(*parts).with_suffix(".py")
                    if not target.exists():
                        target = SOURCES.joinpath(*parts, "base.py")
                    return _find_class(alias.name, target, parse(target))
    return None
