"""A hook of mkdocs: pages made from what they describe, so that they cannot go stale.

The recipe's page comes from its JSON schema, the methods' from the catalog, the API's from the
source tree. Nothing is written to docs/; what lies there under such a name is for readers of the
repository, and says how the page is made.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import class_curves
import linear_forms
import which_adapter
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from modicum.cli.method_page import search_rows
from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.planner.combinations import COLUMNS, PROVEN, CombinationRow, refusal
from modicum.planner.combinations import rows as combined_rows
from modicum.proofs.contracts.base import BATTERIES, checks, skipped_by_traits
from modicum.recipe.json_schema import json_schema
from modicum.recipe.schema_words import section_of, words_of
from modicum.recipe.slots import SLOTS, methods_for

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SOURCES = Path(__file__).resolve().parents[1] / "src" / "modicum"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the generated pages their places in the navigation."""
    [reference] = [item["Reference"] for item in config.nav or [] if "Reference" in item]
    reference[:0] = [
        {"Recipe": "reference/recipe.md"},
        {"Methods": "reference/methods.md"},
        {"Combinations": "reference/combinations.md"},
        {"Models": "reference/models.md"},
        {"Tuned optimizers": "reference/tuned-optimizers.md"},
        {"Linear forms": "reference/linear-forms.md"},
    ]
    reference.append({"API": [{name: f"reference/api/{name}.md"} for name in packages()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, in place of those that say how they are made."""
    pages = {
        "recipe": recipe_page,
        "methods": methods_page,
        "combinations": combinations_page,
        "models": models_page,
        "tuned-optimizers": tuned_page,
        "linear-forms": linear_forms.page,
    }
    for name, made in pages.items():
        path = f"reference/{name}.md"
        if (there := files.get_file_from_path(path)) is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=made()))
    made_of_results = which_adapter.files() | {class_curves.PICTURE: class_curves.picture()}
    for path, content in made_of_results.items():
        if (there := files.get_file_from_path(path)) is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=content))
    for name in packages():
        page = File.generated(config, f"reference/api/{name}.md", content=api_page(name))
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the picture of a page that says, for readers of the repository, how it is made."""
    return class_curves.shown(markdown) if page.file.src_uri == class_curves.PAGE else markdown


def packages() -> list[str]:
    """The public packages of modicum; the command line is described by `modicum --help`."""
    found = {path.parent.name for path in SOURCES.glob("*/__init__.py")} - {"cli"}
    return sorted(found, key=lambda name: (name != "core", name))


def api_page(package: str) -> str:
    """The package's docstring, then every public module of it."""
    folder = SOURCES / package
    lines = [f"# modicum.{package}", "", docstring(folder / "__init__.py"), ""]
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(SOURCES).with_suffix("").parts
        if not any(part.startswith("_") for part in parts):
            module = ".".join(("modicum", *parts))
            lines += [f"## {module.removeprefix(f'modicum.{package}.')}", "", f"::: {module}", ""]
    return "\n".join(lines)


def docstring(file: Path) -> str:
    """The docstring of a module, read without importing it."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def methods_page() -> str:
    """A table of the catalog, and what each method takes."""
    records = sorted(catalog().values(), key=lambda record: (record.room, record.name))
    lines = [
        "# Methods",
        "",
        "What `modicum methods` lists. Of its verdict, *claim* says how far the paper's headline "
        "was found here, and *against* how the method stands against the best simple alternative "
        "at equal budget ([what the words mean](proofs.md)). The status tells both, and why; how "
        "the implementation was checked; whether it has run on a GPU.",
        "",
        "| room | name | method | claim | against | status |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{r.room}` | [`{r.name}`](#{r.name}) | {cell(r.title)} | {r.info.claim_verdict} "
        f"| {cell(str(r.info.against))} | {cell(r.status)} |"
        for r in records
    ]
    for record in records:
        lines += ["", f"## {record.name} {{ #{record.name} }}", "", record.summary, ""]
        lines += [f"*Source*: {record.info.paper}. *Claim*: {record.info.claim}", ""]
        lines += [checks_line(record), ""]
        if record.fields:
            described = record.model.model_json_schema()
            for name, value in described["properties"].items():
                value["description"] = record.meanings[name]
            lines += [*HEADER, *rows(described, described, "")]
        lines += search_lines(record)
    return "\n".join(lines)


def search_lines(record: MethodRecord) -> list[str]:
    """A method's search table, as `modicum methods NAME` shows it."""
    if not record.search.fields:
        return []
    whose = "the method's own" if record.own_search else "that of its room"
    size = f"; `{record.search.size}` sets its size" if record.search.size else ""
    lines = [f"*[To tune](search-tables.md)*, by a table that is {whose}{size}:", ""]
    lines += ["| in a recipe | values | scale | default |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{path}` | {cell(values)} | {scale} | {cell(default)} |"
        for _, path, values, scale, default in search_rows(record)
    ]
    return ["", *lines]


def checks_line(record: MethodRecord) -> str:
    """How many checks of its room's battery a method passes, and which say nothing of it."""
    if record.room not in BATTERIES:
        return "*Checks*: its room has no battery of checks."
    subject = record.load()
    count, left_out = len(checks(record.room, slot=record.info.slot)), skipped_by_traits(subject)
    share = f" ({len(left_out) / count:.0%})" if left_out else ""
    line = f"*Checks*: {count - len(left_out)} of {count}"
    if left_out:
        names = ", ".join(f"`{name}`" for name in left_out)
        line += f"; {len(left_out)}{share} are about what it does not claim: {names}"
    return f"{line}."


def combinations_page() -> str:
    """Which method runs with what, and what is refused: rules give it, and tests train each row."""
    every = list(combined_rows())
    exceptions = yaml.safe_load((Path(__file__).parent / "combinations.yaml").read_text())
    sentences: dict[str, None] = {}
    lines = [
        "# Combinations",
        "",
        "Rules over traits give the table, and the same rules refuse a recipe before anything "
        "starts, with the sentence below. A test trains every row on two ranks with all that it "
        "allows at once: sharded weights, several micro-batches, unequal counts of tokens, "
        "bfloat16; stops it, and resumes it to the bit. Exchanges run once more under an adapter, "
        "and on four ranks with weights sharded between two, as does a method of each other room. "
        "Another test compiles every row that may be compiled.",
        "",
        f"| method | {' | '.join(COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
    ]
    for row in every:
        cells = [verdict(row, column, exceptions["exceptions"]) for column in COLUMNS]
        for text in cells:
            if text != "✓":
                sentences.setdefault(text)
        numbers = {text: str(number) for number, text in enumerate(sentences, start=1)}
        shown = ["✓" if text == "✓" else f"({numbers[text]})" for text in cells]
        lines.append(f"| {row.name} | {' | '.join(shown)} |")
    lines += ["", "## Columns", ""]
    lines += [f"- **{name}**: {meaning}" for name, meaning in COLUMNS.items()]
    lines += ["", "## What does not run, or does otherwise", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(sentences, start=1)]
    return "\n".join(lines)


def verdict(row: CombinationRow, column: str, exceptions: dict[str, dict[str, str]]) -> str:
    """A check mark, or why there is none."""
    for name in (row.record.name, row.record.room):
        if column in exceptions.get(name, {}):
            return exceptions[name][column]
    if column in PROVEN:
        battery = checks(row.record.room, slot=row.record.info.slot)
        return "✓" if any(check.proves == column for check in battery) else "no check proves it"
    error = refusal(row, column)
    return "✓" if error is None else error.problem.partition(": ")[2] or error.problem


def recipe_page() -> str:
    """One table for each section of the recipe."""
    schema = json_schema()
    lines = [
        "# Recipe",
        "",
        "A recipe is a YAML file, or `modicum.Recipe(...)` with the same spellings. On the command "
        "line `--set section.field=value` changes a field.",
    ]
    plain: list[str] = []
    for name, value in schema["properties"].items():
        target = section_of(value, schema)
        if name in SLOTS:
            linked = (f"[`{method}`](methods.md#{method})" for method in methods_for(name))
            lines += ["", f"## {name}", "", value.get("description", ""), ""]
            lines += [f"`method` is one of {', '.join(linked)}; other fields are the method's."]
        elif "properties" in target:
            lines += ["", f"## {name}", "", target.get("description", ""), "", *HEADER]
            lines += list(rows(target, schema, f"{name}."))
        else:
            plain.append(row(name, value, schema))
    if plain:
        lines += ["", "## Top level", "", *HEADER, *plain]
    return "\n".join(lines)


HEADER = ("| field | type | default | meaning |", "| --- | --- | --- | --- |")


def rows(section: Mapping[str, Any], schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A row for each field of a section, sections within it included."""
    for name, value in section["properties"].items():
        target = section_of(value, schema)
        if "properties" in target:
            yield from rows(target, schema, f"{prefix}{name}.")
        else:
            yield row(prefix + name, value, schema)


def row(field: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A field as a row: name, type, default, meaning."""
    default = ""
    if "default" in value:
        default = "`null`" if value["default"] is None else f"`{value['default']}`"
    kind = cell(words_of(value, schema))
    return f"| `{field}` | {kind} | {default} | {cell(value.get('description', ''))} |"


def models_page() -> str:
    """Which decoders of transformers do what, as `benchmarks/architectures.py` has seen it."""
    found = json.loads((RESULTS / "architectures.json").read_text(encoding="utf-8"))
    columns = {
        "train": "train", "resume": "resume to the bit", "export": "export", "chat": "chat",
        "lora": "LoRA", "merge": "merge", "nf4": "nf4 + LoRA",
        "nf4_merge": "merge of it", "packing": "packing", "compress": "compress",
        "fsdp": "FSDP2", "compile": "compile", "forecast": "forecast",
    }  # fmt: skip
    said: dict[str, None] = {}

    def mark(words: str | dict[str, int]) -> str:
        if isinstance(words, dict):
            return f"{words['predicted'] / words['measured'] - 1:+.1%}"
        if words == "seen":
            return "✓"
        said.setdefault(words)
        return f"[{[*said].index(words) + 1}](#what-the-numbers-mean)"

    lines = [
        "# Models",
        "",
        "`model.path` takes any folder whose `config.json` names a decoder of text that "
        "transformers knows, with weights in safetensors. Llama, Mistral and Qwen2 folders "
        "that the built-in decoder can compute are its own; all others are transformers' own "
        "modules, with weights that are read tensor by tensor. Nothing is taken from an "
        "architecture's name: before a run, a small random model of the same kind shows "
        "whether logits depend on later tokens, which is refused, and what keeps documents of "
        "a row apart.",
        "",
        "`model.path: hub:OWNER/NAME,revision=REVISION` is a model of the Hugging Face hub "
        "(`pip install 'modicum[hf]'`), in the hub's own cache. A plan downloads config.json and "
        "the tokenizer, a run safetensors too, and never pickled weights; rank 0 downloads, the "
        "others wait. The run stays with the commit that it began with. With `HF_HUB_OFFLINE=1`, "
        "or without network, the cache is used.",
        "",
        "Code in a model's folder (`auto_map` in config.json) is not run, unless the recipe has "
        "`model.trust_remote_code: true` (`--trust-remote-code` of `modicum chat`, `serve`, "
        "`merge` and `export`): then transformers imports it, a warning names the files, and it "
        "can do whatever you can. It is only for models that transformers does not have itself; "
        "exports have a copy of it.",
        "",
        f"What stands here was run with transformers {found['versions']['transformers']} on tiny "
        "random models (`python benchmarks/architectures.py`). Full training, LoRA and LoRA on "
        "4-bit weights: the loss falls. Export and merge: transformers computes the same logits. "
        "Chat: token for token what transformers generates. Packing: documents that share a row "
        "are computed at once, each as it would be alone. Compress: low-rank factors of fwsvd, "
        "trained; their small folder computes what transformers does on the dense export. FSDP2, "
        "on two ranks, and compiled blocks: the losses of one eager process. Forecast: how far the "
        "planned peak of tensors was from the measured one, in full training. An empty cell was "
        "not run.",
        "",
        f"| model | `model_type` | {' | '.join(columns.values())} |",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    for name, row in found["models"].items():
        marks = " | ".join(mark(row[column]) if column in row else "" for column in columns)
        lines.append(f"| {name} | `{row['model_type']}` | {marks} |")
    if said:
        lines += ["", "## What the numbers mean", ""]
        lines += [f"{number}. {words}" for number, words in enumerate(said, 1)]
    if found["large"]:
        lines += ["", "## Forecasts", "", "Bytes of tensors at the peak of a full training:", ""]
        lines += [
            "| model | predicted | measured | predicted / measured |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {name} | {row['predicted'] / 1e6:.0f} MB | {row['measured'] / 1e6:.0f} MB | "
            f"{row['predicted'] / row['measured']:.3f} |"
            for name, row in found["large"].items()
        ]
    return "\n".join(lines)


def tuned_page() -> str:
    """How much less data optimizers need than tuned AdamW, as `benchmarks/tuned.py` found it."""
    found = json.loads((RESULTS / "tuned.json").read_text(encoding="utf-8"))
    lines = [
        "# Tuned optimizers",
        "",
        "How much more data AdamW needs for the same held-out loss of a small character model, "
        "both tuned over learning rates of their own: 1.3 is 1.3 times as much. AdamW is trained "
        "at several budgets, and what lies between them is read off its curve. The interval is "
        "Student's at 95 %, over seeds of the same first weights and batches. Quick proofs are so "
        "short that they favour what converges fast; their figures and those of full proofs do not "
        "compare. `modicum prove NAME --full` measures a row, `modicum compare --vary "
        "optimizer=adamw,NAME --protocol fair_optim` the same on your model and data.",
        "",
        "| optimizer | arm | speed-up in data | 95 % | loss over AdamW's | seeds | proof |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{row['optimizer']}` | {cell(row['arm'])} | {row['speed_up']:.2f} | "
        f"{row['lower']:.2f} to {row['upper']:.2f} | {row['loss_over_adamw']:.3f} | "
        f"{row['seeds']} | {row['proof']} |"
        for row in found["rows"]
    ]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text that cannot break a table."""
    return " ".join(text.split()).replace("|", "\\|")
