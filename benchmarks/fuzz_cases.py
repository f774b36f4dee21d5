"""What the fuzzer tries: commands on the world with something spoilt, drawn from a number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz_mutations import VALUES, WORDS, content, place, value
from fuzz_tensors import spoil

from modicum.recipe import SLOTS, Recipe, methods_for

# A spoilt recipe may ask for a run of days: that is no fault. The last override counts.
SMALL = (
    "training.steps=2", "training.batch_size=2", "training.compile=none", "data.limit=50kB",
    "samples.tokens=4", "samples.count=1", "budget.memory=1500MB", "evaluation.rows=2",
)  # fmt: skip
FAST = [word for override in SMALL for word in ("--set", override)]
CODES = {0, 2}
MAY_NOT_FIT = CODES | {3}
WANTING = CODES | {5}


@dataclass
class Case:
    """A command, and what may come of it; `make` spoils the world first and says how."""

    family: str
    words: list[str]
    make: Callable[[Random, Path], str] = lambda random, world: "nothing"
    codes: set[int] = field(default_factory=lambda: CODES)
    outputs: tuple[str, ...] = ()
    """Where the command may write."""
    environment: dict[str, str] = field(default_factory=dict)
    output: str = "out"
    typed: str = ""
    fresh: bool = False


def draw(random: Random) -> Case:
    """An input."""
    families, weights = zip(*_FAMILIES, strict=True)
    case = random.choices(families, weights)[0](random)
    case.output = random.choices(("out", "full", "closed"), (40, 1, 1))[0]
    case.fresh = case.fresh or random.random() < 0.015
    return case


def _train(random: Random, recipe: str, out: str) -> Case:
    """A command that reads a recipe: mostly those that do not train."""
    kind = random.choices(("plan", "dry", "train"), (5, 1, 2))[0]
    if kind == "plan":
        as_json = random.choice(([], ["--json"]))
        return Case("", ["plan", recipe, *as_json], codes=MAY_NOT_FIT)
    words = ["train", recipe, "--out", out, *FAST]
    words.append("--dry-run" if kind == "dry" else random.choice(("-q", "-q", "--json")))
    return Case("", words, codes=MAY_NOT_FIT, outputs=(out,))


def _recipes(random: Random) -> Case:
    """A field of a recipe, by an override or in the file; or the file's text."""
    recipe = random.choice(("new.yaml", "adapted.yaml"))
    case = _train(random, recipe, "run")
    case.family = "recipe"
    if random.random() < 0.35:
        case.make = lambda random, world: content(random, world / recipe)
        return case
    # Before the overrides that keep it small.
    words = [word for _ in range(random.choice((1, 1, 2))) for word in ("--set", _override(random))]
    case.words[2:2] = words
    return case


def _override(random: Random) -> str:
    plain = Recipe().plain()
    section = random.choice(sorted(plain))
    if section in SLOTS and random.random() < 0.9:
        methods = methods_for(section)
        name = random.choice(sorted(methods))
        fields = sorted(methods[name].model.model_fields)
        told: dict[str, Any] = {"method": name}
        if fields:
            told[random.choice(fields)] = value(random, random.choice((1, 0.5, "q_proj")))
        return f"{section}={_spelled(told)}"
    inner = plain[section]
    if isinstance(inner, dict) and inner and random.random() < 0.95:
        name = random.choice(sorted(inner))
        return f"{section}.{name}={_spelled(value(random, inner[name]))}"
    return f"{section}={_spelled(random.choice(VALUES))}"


def _spelled(told: Any) -> str:
    """In YAML, which JSON is; a surrogate stays an escape, as no command line can hold it."""
    return json.dumps(told)


def _data(random: Random) -> Case:
    name = random.choice(("text.txt", "data.jsonl", "texts", "table.csv", "texts/3.py", "pipe"))
    case = _train(random, random.choice(("new.yaml", "adapted.yaml")), "run")
    case.family = "data"
    given = "texts" if name.startswith("texts/") else name
    more = random.choice(
        ([], [], [f"data.validation_path={given}"], ["data.include=['*']"], ["data.column=id"],
         ["data.prompt_column=id"], ["data.validation_fraction=0"])
    )  # fmt: skip
    case.words[2:2] = [w for o in (f"data.path={given}", *more) for w in ("--set", o)]
    case.make = lambda random, world: _spoil(random, world / name)
    return case


def _spoil(random: Random, path: Path) -> str:
    if not path.is_file() or random.random() < 0.2:
        return f"{path.name}: {place(random, path)}"
    return f"{path.name}: {content(random, path)}"


def _some(random: Random, folder: Path, names: Sequence[str]) -> str:
    """Spoil one of the files of a folder, or all of it."""
    files = sorted({path for name in names for path in folder.glob(name) if path.is_file()})
    if not files or random.random() < 0.05:
        return f"{folder.name}: {place(random, folder)}"
    chosen = random.choice(files)
    return f"{folder.name}/{_spoil(random, chosen)}"


def _chat(run: str) -> list[str]:
    return ["chat", run, "--prompt", "def", "--max-tokens", "3"]


def _models(random: Random) -> Case:
    words = random.choice(
        (_chat("new"), _chat("new/model"), _chat("adapted"), ["plan", "adapted.yaml"],
         ["merge", "adapted", "--out", "merged"],
         ["train", "adapted.yaml", "--out", "run", *FAST, "-q"])
    )  # fmt: skip
    names = ("config.json", "*.safetensors", "tokenizer*.json", "*.json")
    return Case(
        "model",
        words,
        make=lambda random, world: _some(random, world / "new" / "model", names),
        codes=MAY_NOT_FIT if words[0] in ("plan", "train") else CODES,
        outputs=("merged", "run"),
    )


def _adapters(random: Random) -> Case:
    """Commands on an adapter's run: on its own adapter, or on one of any method and format."""
    words = random.choice((_chat("adapted"), ["merge", "adapted", "--out", "merged"]))
    of_any = random.random() < 0.7

    def make(random: Random, world: Path) -> str:
        inside = world / "adapted" / ("adapter" if of_any else "tokenizer")
        if not of_any:
            return _some(random, inside, ("*",))
        other = random.choice(sorted((world / "adapters").iterdir()))
        shutil.rmtree(inside)
        shutil.copytree(other, inside)
        return f"{other.name}: {spoil(random, inside)}"

    return Case("adapter", words, make=make, outputs=("merged",))


def _runs(random: Random) -> Case:
    run = random.choice(("new", "adapted"))
    words, outputs = random.choice(
        (
            (["report", run], (f"{run}/report.html",)),
            (["report", run, "--json"], ()),
            (["report", "new", "adapted", "--out", "both.html"], ("both.html",)),
            (_chat(run), ()),
            (["train", f"{run}.yaml", "--out", run, "-q"], (run,)),
            (["train", f"{run}.yaml", "--out", run, "-q", "--set", "training.steps=3"], (run,)),
            (["train", f"{run}.yaml", "--out", "run", "--fork", run, *FAST, "-q",
              "--set", "training.steps=3"], ("run",)),
        )
    )  # fmt: skip
    deep = random.random() < 0.3
    return Case(
        "run",
        words,
        make=lambda random, world: _some(
            random, world / run, ("checkpoints/**/*", "data/*") if deep else ("*",)
        ),
        codes=MAY_NOT_FIT,
        outputs=outputs,
    )


_LINES: tuple[tuple[list[str], tuple[str, ...]], ...] = (
    (["--version"], ()),
    (["methods", "--room", "adapters", "--json"], ()),
    (["methods", "--plugin", "mine.py"], ()),
    (["schema"], ()),
    (["plan", "new.yaml", "--set", "training.steps=3", "--json", "--ranks", "2"], ()),
    (["train", "new.yaml", "--out", "new", "--progress", "json"], ("new",)),
    (["train", "new.yaml", "--out", "run", "--dry-run", "--fork", "new"], ()),
    (["init", "--model", "new", "--data", "texts", "--memory", "2GB", "--out", "made.yaml"],
     ("made.yaml", "recipe.schema.json")),
    (["report", "new", "--json"], ("new/report.html",)),
    (["chat", "new", "--prompt", "def", "--max-tokens", "3", "--temperature", "1", "--seed", "1"],
     ()),
    (["chat", "adapted", "--base", "--prompt", "x", "--max-tokens", "2"], ()),
    (["merge", "adapted", "--out", "merged"], ("merged",)),
    (["bench", "machine", "--json"], ()),
    (["promises", "one", "--file", "promises.yaml"], ("benchmarks",)),
    (["check", "text.txt", "--json"], ()),
    (["prove", "nope", "--save", "proofs", "--json"], ("proofs",)),
)  # fmt: skip
# Of these only what can be reported at once is tried: what is right takes minutes.
_REFUSED: tuple[list[str], ...] = (
    ["demo", "--runs", "text.txt"],
    ["demo", "--runs", "loop/x"],
    ["drill", "--count", "0"],
    ["drill", "--output", "texts"],
    ["drill", "--output", "loop/x"],
    ["drill", "--work", "text.txt/x"],
    ["prove", "lora", "--save", "text.txt"],
    ["prove", "lora", "--save", "/proc/nope"],
    ["prove", "lora", "--save", "x" * 300],
    ["check", "pipe/x"],
)
_EXITS_OF_A_CHECK = ("promises", "check", "drill")


def _words(random: Random) -> Case:
    """A line with a word changed, left out, doubled or put in."""
    if random.random() < 0.1:
        return Case("words", list(random.choice(_REFUSED)))
    line, outputs = random.choice(_LINES)
    words = list(line)
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(words)) if words else 0
        change = random.choice(("replace", "replace", "replace", "remove", "double", "insert"))
        if change == "insert" or not words:
            words.insert(at, random.choice(WORDS))
        elif change == "double":
            words.insert(at, words[at])
        elif change == "remove":
            del words[at]
        else:
            words[at] = random.choice(WORDS)
    spared = {"demo", "drill", "prove lora", "--again"}  # minutes each
    if spared & {*words, " ".join(words[:2])} or words[:2] == ["train", "demo-pretrain"]:
        words = ["methods"]
    case = Case("words", words, codes=MAY_NOT_FIT, outputs=outputs)
    if words[:1] and words[0] in _EXITS_OF_A_CHECK:
        case.codes = WANTING
    # A changed word may be the name of what is written.
    case.outputs += tuple(
        words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--out", "--save", "--file")
    )
    case.typed = random.choice(("", "", "def\n/new\nx\n", "\udcff\n", "\0\n"))
    return case


def _files(random: Random) -> Case:
    """Files that are none of a run's: promises, plugins, recipes in place of others."""
    name, words = random.choice(
        (
            ("promises.yaml", ["promises"]),
            ("figures.json", ["promises", "one"]),
            ("mine.py", ["methods", "--plugin", "mine.py", "--json"]),
            ("mine.py", ["plan", "new.yaml", "--set", "plugins=[mine.py]"]),
            ("new.yaml", ["train", "new.yaml", "--out", "new", "-q"]),
            ("new/recipe.yaml", ["plan", "new/recipe.yaml"]),
        )
    )
    return Case(
        "files",
        words,
        make=lambda random, world: _spoil(random, world / name),
        codes=WANTING if words[0] == "promises" else MAY_NOT_FIT,
        outputs=("benchmarks", "README.md") if words[0] == "promises" else ("new",),
    )


_ENVIRONMENT = {
    "LC_ALL": ("C", "POSIX", "nope", "C.UTF-8"),
    "PYTHONUTF8": ("0", "1"),
    "PYTHONCOERCECLOCALE": ("0",),
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16", "ascii:strict", "utf-8:surrogateescape"),
    "TERM": ("", "dumb", "nope"),
    "COLUMNS": ("0", "-1", "x", "9" * 30),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
    "HOME": ("", "/nowhere", "/dev/null"),
    "TMPDIR": ("", "/nowhere", "/dev/null"),
    "RANK": ("", "0", "1", "-1", "x"),
    "WORLD_SIZE": ("", "0", "1", "-1", "x", "9" * 30),
    "LOCAL_RANK": ("x", "-1"),
    "OMP_NUM_THREADS": ("1",),
    "PATH": ("", "/nowhere"),
    "MPLBACKEND": ("nope",),
    "MPLCONFIGDIR": ("/dev/null",),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "x"),
    "PYTHONWARNINGS": ("default", "nope"),
}


def _environments(random: Random) -> Case:
    names = random.sample(sorted(_ENVIRONMENT), random.choice((1, 2, 3)))
    environment = {name: random.choice(_ENVIRONMENT[name]) for name in names}
    words, outputs = random.choice(
        (
            *((line, outputs) for line, outputs in _LINES),
            (["--help"], ()),
            (["plan", "adapted.yaml"], ()),
            (["train", "new.yaml", "--out", "run", *FAST, "--progress", "live"], ("run",)),
            (["train", "new.yaml", "--out", "é", *FAST], ("é",)),
        )
    )
    case = Case("environment", list(words), outputs=outputs, environment=environment)
    case.codes = WANTING if words[0] in _EXITS_OF_A_CHECK else MAY_NOT_FIT
    case.fresh = True
    case.typed = "é\n"
    return case


_FAMILIES: tuple[tuple[Callable[[Random], Case], int], ...] = (
    (_recipes, 30),
    (_data, 14),
    (_models, 14),
    (_adapters, 8),
    (_runs, 12),
    (_words, 18),
    (_files, 6),
    (_environments, 2),
)
