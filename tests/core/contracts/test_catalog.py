from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from modicum.core.contracts import catalog as home
from modicum.core.contracts.catalog import (
    ENTRY_POINTS,
    LONGEST_NAME,
    ROOMS,
    built_in,
    catalog,
    find,
    of_value,
    read_file,
)
from modicum.core.contracts.method import Against, Context, Info, Method
from modicum.core.errors import InputError

METHOD = '''
"""A method of a stranger, whose file must not run when it is read."""
from __future__ import annotations
from typing import Annotated, Literal
from pydantic import Field
from modicum.core.contracts.method import Info, Method, PositiveInt, Strings
import {imported}

class Mine(Method):
    """Does nothing, well.

    More of it.
    """
    info = Info(name={name!r}, title="Mine", room="adapters", paper="none", claim="none",
                traits=({traits}))
    rank: PositiveInt = 4
    kind: Literal["a", "b"] = "a"
    scale: Annotated[float, Field(ge=0, le=2)] = 1.0
    names: Strings = ()
    needed: int
    def work(self):
        return None
'''


def plugin(folder: Path, *, name="mine", traits='"mergeable",', imported="json", file="my.py"):
    path = folder / file
    path.write_text(METHOD.format(name=name, traits=traits, imported=imported))
    return path


def error_of(text: str, folder: Path) -> str:
    file = folder / "broken.py"
    file.write_text(textwrap.dedent(text))
    with pytest.raises(InputError) as caught:
        catalog([file])
    return str(caught.value).replace(f"{folder}/", "")


def test_what_is_read_is_what_importing_gives():
    records = catalog()
    assert "lora" in records
    for record in records.values():
        loaded = record.load()
        assert loaded.info == record.info
        assert record.room in ROOMS
        assert Path(sys.modules[loaded.__module__].__file__) == record.file
        assert record.summary
        fields = {name: field.default for name, field in loaded.model_fields.items()}
        assert fields == {name: default for name, (_, default) in record.fields.items()}
        assert of_value(loaded()) == record


def test_a_built_in_method_is_found_by_its_file_alone(monkeypatch):
    def read(file, module=None):
        assert file.stem == "lora", "another file was read"
        return original(file, module)

    original = home.read_file
    monkeypatch.setattr(home, "read_file", read)
    home._read_once.cache_clear()
    assert find("lora", room="adapters").name == "lora"
    assert home.built_in("base") is None  # a helper is no method
    assert home.built_in("../lora") is None


def test_a_built_in_method_is_read_again_once_its_file_has_changed(tmp_path, monkeypatch):
    (tmp_path / "comm").mkdir()
    file = plugin(tmp_path / "comm", file="mine.py")
    monkeypatch.setattr(home.source_reading, "SOURCES", tmp_path)
    first = home.built_in("mine")
    assert home.built_in("mine") is first
    file.write_text(file.read_text().replace('title="', 'title="Another '))
    again = home.built_in("mine")
    assert again.info.title == f"Another {first.info.title}"


@pytest.fixture
def uncached(tmp_path, monkeypatch):
    """A cache of its own, and a process that has read nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home._built_in.cache_clear()
    yield tmp_path / "cache" / "modicum" / "catalog"
    home._built_in.cache_clear()


def test_what_was_read_is_kept_and_given_back_the_same(uncached, monkeypatch):
    first = catalog()
    (file,) = uncached.iterdir()
    home._built_in.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(home, "read_file", None)
        again = catalog()
    assert again == first
    assert again["lora"].fields == first["lora"].fields
    assert [record.as_json() for record in again.values()] == [
        record.as_json() for record in first.values()
    ]
    kept = file.read_text(encoding="utf-8")
    no_rows = json.dumps(json.loads(kept) | {"methods": [None]})
    others = (kept.replace('"traits"', '"tracts"'), no_rows, "[" * 100_000)
    for damaged in ("", "[]", '{"stamp": 1}', kept[:2000], *others):
        file.write_text(damaged, encoding="utf-8")
        home._built_in.cache_clear()
        assert catalog() == first
        assert file.read_text(encoding="utf-8") == kept


def test_a_cache_of_other_files_is_not_used(uncached):
    first = catalog()
    (file,) = uncached.iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))
    content["stamp"][0][1] += 1
    content["methods"] = []
    file.write_text(json.dumps(content), encoding="utf-8")
    home._built_in.cache_clear()
    assert catalog() == first


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    home._built_in.cache_clear()
    assert "lora" in catalog()
    home._built_in.cache_clear()


def test_the_catalog_needs_no_torch():
    code = """
import sys
from modicum.core.contracts.catalog import catalog
catalog()["lora"].validate({"rank": 3})
assert not {"torch", "modicum.adapters.lora"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_docstrings_say_what_every_field_means():
    missing = {
        f"{record.name}.{field}"
        for record in catalog().values()
        for field in record.fields
        if not record.meanings.get(field)
    }
    assert missing == set()
    about = find("lora_limits").description
    assert about[0].startswith("It changes nothing and is no adapter: a row for each head")
    assert sum(line.startswith("- ") for line in about) >= 4
    assert not any(word in line for line in about for word in ("Args:", ">>>", "Source:"))
    lora = find("lora").meanings
    assert "rank" in lora
    assert "\n" not in "".join(lora.values())
    assert find("nf4").meanings["targets"] == find("int8").meanings["targets"]  # of their base


def test_a_plugin_is_read_without_running_it(tmp_path):
    file = plugin(tmp_path, imported="there_is_no_such_module")
    record = catalog([file])["mine"]
    assert (record.class_name, record.room, record.summary) == (
        "Mine",
        "adapters",
        "Does nothing, well.",
    )
    defaults = {name: default for name, (_, default) in record.fields.items()}
    assert defaults == {"rank": 4, "kind": "a", "scale": 1.0, "names": (), "needed": ...}
    with pytest.raises(ModuleNotFoundError):
        record.load()


def test_a_plugin_is_imported_once_and_by_its_path(tmp_path):
    (tmp_path / "other").mkdir()
    one, two = plugin(tmp_path), plugin(tmp_path / "other", name="second")
    loaded = read_file(one)[0].load()
    assert read_file(one)[0].load() is loaded
    assert of_value(loaded(needed=1)).file == one
    # Another file of the same name is another module.
    assert read_file(two)[0].load().info.name == "second"
    assert of_value(loaded(needed=1)).name == "mine"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"needed": 1, "rank": 0}, "rank: too small (found: 0); allowed: at least 1"),
        ({"needed": 1, "rank": 2.0}, "rank: expected an integer (found: 2.0)"),
        ({"needed": 1, "rank": True}, "rank: expected an integer (found: True)"),
        ({"needed": 1, "scale": 3.0}, "scale: too large (found: 3.0); allowed: at most 2.0"),
        ({"needed": 1, "scale": float("nan")}, "scale: too large (found: nan)"),
        ({"needed": 1, "kind": "c"}, "kind: not one of the known words (found: 'c')"),
        ({"needed": 1, "rnak": 3}, "rnak: unknown key; allowed: kind, names, needed, rank, scale."),
        ({"needed": 1, "names": "q"}, "names: expected a list (found: 'q')"),
        ({}, "needed: this field is needed"),
    ],
)
def test_the_record_checks_as_the_method_does(tmp_path, values, message):
    record = read_file(plugin(tmp_path))[0]
    with pytest.raises(InputError) as of_record:
        record.validate(values, prefix="adapter.")
    assert str(of_record.value).startswith(f"adapter.{message}")
    with pytest.raises(InputError) as of_method:
        record.load()(**values)
    assert f"adapter.{of_method.value}" == str(of_record.value)


def test_lists_become_tuples(tmp_path):
    record = read_file(plugin(tmp_path))[0]
    record.validate({"needed": 1, "names": ["q", "k"]})
    assert record.load()(needed=1, names=["q", "k"]).names == ("q", "k")


def test_unknown_methods_are_answered_with_the_nearest():
    with pytest.raises(InputError, match=r"unknown method \(found: 'lorra'\).*mean 'lora'\?"):
        find("lorra")
    with pytest.raises(InputError, match="unknown method in the room 'optim'"):
        find("lora", room="optim")
    assert find("lora", room="adapters").title.startswith("LoRA")


@pytest.mark.parametrize("name", ["lora" * 16, "lora" * 1000, "../adapters/lora", ""])
def test_a_name_that_no_file_can_have_is_unknown(name: str) -> None:
    assert built_in(name) is None
    with pytest.raises(InputError, match="unknown method in the room 'adapters'"):
        find(name, room="adapters")


def test_no_method_has_a_longer_name() -> None:
    assert max(map(len, catalog())) <= LONGEST_NAME


def test_broken_plugins_are_named_with_their_line(tmp_path):
    assert error_of("x = 1\ndef f(:\n  pass", tmp_path).startswith(
        "broken.py:2: not valid Python: "
    )
    assert error_of("class A:\n    info = 3\n", tmp_path) == (
        "broken.py:1: `info` must be an Info(...) of literals"
    )
    text = """
    from modicum.core.contracts.method import Info
    class A:
        info = Info(name="a", title="a", room="comm", paper="", claim="", traits=("mergable",))
    """
    assert "broken.py:4" in error_of(text, tmp_path)
    assert "Did you mean 'mergeable'?" in error_of(text, tmp_path)
    text = """
    import torch
    from modicum.core.contracts.method import Info
    class A:
        info = Info(name=torch.__version__, title="a", room="comm", paper="", claim="")
    """
    assert error_of(text, tmp_path).startswith("broken.py:5: cannot be read without running")
    (tmp_path / "broken.py").write_bytes(b"x = '\xff'")
    with pytest.raises(InputError, match="not valid Python"):
        catalog([tmp_path / "broken.py"])
    (tmp_path / "broken.py").write_bytes(b"x = \0")
    with pytest.raises(InputError, match="not valid Python"):
        catalog([tmp_path / "broken.py"])
    with pytest.raises(InputError, match=r"none\.py: no such file of methods"):
        catalog([tmp_path / "none.py"])


def test_reading_a_plugin_runs_none_of_it(tmp_path):
    text = """
    from modicum.core.contracts.method import Info
    class A:
        info = __import__("os").system("touch ran")
    """
    assert "cannot be read without running the file" in error_of(text, tmp_path)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("imported", "line"),
    [
        ("typing import sys", 'info = sys.modules["os"].system("touch {ran}")'),
        ("typing import Any", "info = ().__class__"),
        ("typing import Any", "info = [n for n in ()]"),
        ("typing import get_type_hints as Field", 'field: int = Field("touch")'),
        ("pydantic import Field", "field: int = Field(default_factory=lambda: 1)"),
        ("pydantic import ImportString", 'field: ImportString = "os.system"'),
        ("typing import Any", "field: \"__import__('os').system('touch {ran}')\" = 1"),
        ("typing import Optional", "field: Optional[\"print('it ran')\"] = None"),
        ("typing import Any", "field: int = 9**9**9"),
        ("typing import Any", "field: int = 1 << 10**9"),
        ("typing import Any", "field: int = (-~(2**1000)) ** 1000 * 2"),
        ("typing import Any", "field: str = 'a' * 10**12"),
        ("typing import Any", "field: str = '%999999999999d' % 1"),
    ],
)
def test_what_could_reach_code_is_refused(tmp_path: Path, imported: str, line: str) -> None:
    ran = tmp_path / "ran"
    info = '    info = Info(name="a", title="a", room="comm", paper="", claim="")\n'
    text = f"from {imported}\nfrom modicum.core.contracts.method import Info\nclass A:\n"
    text += (info if line.startswith("field") else "") + f"    {line.format(ran=ran)}\n"
    assert "cannot be read without running the file" in error_of(text, tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64 * 1024**2", 1 << 26),
        ("1_000 * 2 % 7 * 0.5", 2.5),
        ("10**-4", 10**-4),
        ("-(2**31)", -2147483648),
        ("3 << 20", 3145728),
    ],
)
def test_a_default_may_be_made_of_numbers(tmp_path: Path, text: str, value: float) -> None:
    file = tmp_path / "made.py"
    info = '    info = Info(name="a", title="a", room="comm", paper="", claim="")\n'
    head = "from modicum.core.contracts.method import Info\nclass A:\n"
    file.write_text(f"{head}{info}    field: float = {text}\n")
    assert catalog([file])["a"].fields["field"] == (float, value)


def test_classes_that_inherit_from_themselves_are_refused(tmp_path: Path) -> None:
    text = """
    from modicum.core.contracts.method import Info
    class A(B):
        info = Info(name="a", title="a", room="comm", paper="", claim="")
    class B(A):
        pass
    """
    assert "inherit from each other in a circle" in error_of(text, tmp_path)


def test_two_methods_of_one_name_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    one, two = plugin(tmp_path), plugin(tmp_path / "other")
    with pytest.raises(InputError, match=rf"{two}: the method 'mine' is already defined in {one}"):
        catalog([one, two])
    with pytest.raises(InputError, match="'lora' is already defined"):
        catalog([plugin(tmp_path, name="lora")])


def test_entry_points_are_found_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    plugin(package, file="method.py", imported="there_is_no_such_module")
    (tmp_path / "stranger-1.0.dist-info").mkdir()
    metadata = tmp_path / "stranger-1.0.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nmine = stranger.method\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = catalog()["mine"]
    assert (record.module, record.file) == ("stranger.method", package / "method.py")
    assert "stranger" not in sys.modules
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nmine = no_stranger.method\n")
    with pytest.raises(InputError, match=r"'mine'.*names a module that is not there"):
        catalog()
    (metadata / "entry_points.txt").unlink()
    metadata.rename(tmp_path / "another-1.0.dist-info")
    assert "mine" not in catalog()


def test_distributions_are_read_once_for_many_recipes(monkeypatch):
    reads = []

    def read(**about):
        reads.append(about)
        return original(**about)

    original = home.importlib.metadata.entry_points
    monkeypatch.setattr(home.importlib.metadata, "entry_points", read)
    home._look_for_points.cache_clear()
    for _ in range(3):
        home.added()
    assert len(reads) == 1


def test_a_class_in_no_file_is_refused_in_a_recipe(monkeypatch):
    info = catalog()["lora"].info
    kind = type("Homeless", (Method,), {"info": info, "__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(InputError, match="a class with an `info` of its own"):
        of_value(kind())


def test_status_is_honest():
    def status(**known: object) -> str:
        return Info("a", "a", "comm", "", "", **known).status

    assert status() == "reconstructed; claim not shown here; not yet run on GPU"
    failed = status(claim_verdict="does not hold", reason="too small", run_on_gpu=True)
    assert failed == "reconstructed; claim does not hold (too small); run on GPU"
    worse = status(claim_verdict="in part", against=Against("worse", "b"), reason="c")
    assert worse == "reconstructed; claim holds in part; worse than b (c); not yet run on GPU"
    baseline = status(claim_verdict="holds", against=Against("baseline"))
    assert baseline == "reconstructed; claim holds; baseline; not yet run on GPU"


def test_a_verdict_holds_only_where_the_claim_does_and_nothing_simpler_is_better():
    rivals = [
        Against(),
        Against("baseline"),
        *(Against(r, "b") for r in ("better", "equal", "worse")),
    ]
    for claim in ("holds", "in part", "does not hold", "not shown here"):
        for against in rivals:
            verdict = Info("a", "a", "comm", "", "", claim_verdict=claim, against=against).verdict
            stands = claim == "holds" and against.result != "worse"
            unknown = claim == "not shown here"
            assert verdict == (claim if unknown else "holds" if stands else "does not hold")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (lambda: Info("a", "a", "comm", "", "", claim_verdict="hold"), "claim_verdict"),
        (lambda: Against("beter", "b"), r"against.result.*Did you mean 'better'"),
        (lambda: Against("better"), r"against.rival"),
        (lambda: Against("baseline", "b"), r"against.rival"),
    ],
)
def test_words_of_a_verdict_are_the_known_ones(said, problem):
    with pytest.raises(InputError, match=problem):
        said()


def test_values_are_frozen_and_methods_must_say_what_they_make():
    class Empty(Method):
        info = catalog()["lora"].info
        rank: int = 3

    value = Empty()
    with pytest.raises(ValueError, match="frozen"):
        value.rank = 4
    assert value == Empty(rank=3)
    with pytest.raises(TypeError, match="bind"):
        value.bind(Context(None))
    with pytest.raises(TypeError, match="ledger"):
        value.ledger(None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"# coding: nope\n", "not valid Python"),
        (b"\xff\xfe", "not valid Python"),
        (b"x = 1\0", "not valid Python"),
        (
            b"from typing import ClssVar\nclass A:\n    info = Info()\n    n: ClssVar = 1\n",
            "A|Info",
        ),
    ],
)
def test_a_plugin_that_cannot_be_read_is_told(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "mine.py").write_bytes(text)
    with pytest.raises(InputError, match=told):
        read_file(tmp_path / "mine.py")
