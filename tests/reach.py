"""What a change can reach: modules by their imports, methods by the catalog, tests by both.

A module that is imported by a name of its package, through the catalog or by a command counts as
imported. What cannot be told apart counts as reached: a test too many costs seconds.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# A change under which more methods than this stand reaches every method's fast battery instead.
FEW = 5
# Files of which no test can be told apart: all that is fast, and the sample, as without a base.
EVERYTHING = (
    "tests/conftest.py",
    "tests/pool.py",
    "tests/reach.py",
    "tests/seconds.json",
    "tests/seconds.py",
    "pyproject.toml",
)
# Other files that are no modules, and the tests that look at them.
LOOKED_AT = {
    ".ci": ("tests/test_ci.py",),
    "CHANGELOG.md": ("tests/test_words.py",),
    "CONTRIBUTING.md": ("tests/test_words.py",),
    "Makefile": ("tests/test_ci.py", "tests/test_install.py"),
    "README.md": ("tests/test_package.py", "tests/test_words.py", "tests/proofs/test_base.py"),
    "benchmarks": ("tests/benchmarks", "tests/test_promises.py", "tests/proofs/test_base.py"),
    "constraints-lowest.txt": ("tests/test_install.py", "tests/test_package.py"),
    "constraints.txt": ("tests/test_install.py", "tests/test_package.py"),
    "docs": ("tests/contributing", "tests/test_package.py", "tests/test_words.py"),
    "promises.yaml": ("tests/test_promises.py",),
    "recipes": ("tests/test_recipe_yaml.py", "tests/cli"),
    "scripts": ("tests/test_install.py", "tests/test_structure.py"),
}
# Names that `import modicum` gives.
PUBLIC = (
    "modicum.recipe.recipe",
    "modicum.planner.planning",
    "modicum.trainer.loop",
)


@dataclass
class Reached:
    """Which tests a change reaches.

    Args:
        files: test files, and folders of them, that run in full.
        methods: those of which every test runs.
        batteries: whether every method's fast battery runs, and a sample of what is slow.
        everything: whether nothing can be left out but by the sample.
    """

    files: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    batteries: bool = False
    everything: bool = False

    def holds(self, file: str) -> bool:
        """Whether a test file runs in full."""
        return any(file == one or file.startswith(f"{one}/") for one in self.files)


class Checkout:
    """The modules and test files below `root`, and who imports whom."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Every module of the package and every test file, by the name that it is imported as."""
        found = {}
        for folder in ("src", "tests"):
            for file in sorted((self.root / folder).rglob("*.py")):
                found[self.name_of(file)] = ast.parse(file.read_text(encoding="utf-8"))
        return found

    def name_of(self, file: Path) -> str:
        """`modicum.a.b` of a module, `tests.a.test_b` of a test file."""
        parts = list(file.relative_to(self.root).with_suffix("").parts)
        parts = parts[1:] if parts[0] == "src" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def defined(self) -> dict[tuple[str, str], set[str]]:
        """The modules of a package, by (package, name), that define a name at their top."""
        found: dict[tuple[str, str], set[str]] = {}
        for module, tree in self.trees.items():
            package = module.rpartition(".")[0]
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.setdefault((package, node.name), set()).add(module)
        return found

    def imports(self, module: str) -> set[str]:
        """The modules that a module imports when it runs, in functions too."""
        tree, known, found = self.trees[module], self.trees.keys(), set()
        for_types = {id(node) for branch in _type_checking(tree) for node in ast.walk(branch)}
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name in known]
                found |= {*names, *(PUBLIC if "modicum" in names else ())}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found |= {inner} if inner in known else {node.module} & known
                    found |= self.defined.get((node.module, alias.name), set())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} & known  # `patch("modicum.a.b")`, homes of lazy names
                if node.value == "modicum" and module.startswith("tests."):  # the command
                    found.add("modicum.cli.app")
        folder = module.rpartition(".")[0]
        if folder.startswith("tests."):
            found |= {f"{folder}.conftest"} & known
        return found - {module}

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """Who imports a module directly."""
        found: dict[str, set[str]] = {}
        for module in self.trees:
            for other in self.imports(module):
                found.setdefault(other, set()).add(module)
        return found

    def dependents(self, module: str) -> set[str]:
        """Who stands on a module, itself included."""
        found, todo = set(), [module]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo += self.importers.get(one, set())
        return found

    def reached(self, changed: Iterable[str], methods: dict[str, str]) -> Reached:
        """What files that changed reach; `methods` are names by module."""
        result = Reached()
        for name in changed:
            file = self.root / name
            if name in EVERYTHING or (name.startswith("src/") and file.suffix != ".py"):
                result.everything = True
            elif name.startswith(("src/modicum/", "tests/")):
                self._module(name, file, methods, result)
            else:
                looked = LOOKED_AT.get(name.split("/", maxsplit=1)[0])
                result.files |= {*(looked or ())}
                result.everything |= looked is None
        return result

    def _module(self, name: str, file: Path, methods: dict[str, str], result: Reached) -> None:
        if file.suffix != ".py" or not file.exists():  # data of tests, or a file that is gone
            result.everything |= name.startswith("src/") or not file.exists()
            result.files.add(str(Path(name).parent))
            return
        module = self.name_of(file)
        standing = self.dependents(module)
        tests = {test for test in standing if test.startswith("tests.")}
        reached = {methods[other] for other in standing if other in methods}
        result.files |= {name} | {f"{test.replace('.', '/')}.py" for test in self._own(module)}
        if len(reached) > FEW:
            result.batteries = True
            tests &= self.importers.get(module, set())
        else:
            result.methods |= reached
        result.files |= {f"{test.replace('.', '/')}.py" for test in tests}

    def _own(self, module: str) -> Iterator[str]:
        """The test files that mirror a module."""
        *packages, last = module.split(".")[1:] or [""]
        return (
            test for test in self.trees if test == ".".join(["tests", *packages, f"test_{last}"])
        )


def _type_checking(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node


def git(root: Path, *words: str) -> str | None:
    """What git prints, or None where it cannot say."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def last_green(root: Path) -> str | None:
    """The last commit of this checkout on which `make test` passed, if it is an ancestor."""
    place = git(root, "rev-parse", "--git-path", "modicum-green")
    if place is None or not (root / place).is_file():
        return None
    commit = (root / place).read_text(encoding="utf-8").strip()
    there = git(root, "merge-base", "--is-ancestor", commit, "HEAD")
    return commit if there is not None else None


def note_green(root: Path) -> None:
    """Remember that the tests passed on this commit, if nothing else is in the checkout."""
    head, place = (
        git(root, "rev-parse", "HEAD"),
        git(root, "rev-parse", "--git-path", "modicum-green"),
    )
    if head and place and git(root, "status", "--porcelain") == "":
        (root / place).write_text(f"{head}\n", encoding="utf-8")


def changed_since(root: Path, commit: str) -> list[str]:
    """Files that differ from a commit's, those that git does not know yet included."""
    tracked = git(root, "diff", "--name-only", "--no-renames", commit) or ""
    new = git(root, "ls-files", "--others", "--exclude-standard") or ""
    return sorted({*tracked.splitlines(), *new.splitlines()})
