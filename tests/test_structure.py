"""How the package is built: names with one meaning, imports without circles."""

import ast
import importlib.util
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import modicum
from modicum.core.contracts.catalog import catalog

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(modicum.__file__).parent
# Where a value makes its runtime object: what imports upwards there is imported when it is called.
UPWARDS = {
    ("modicum.adapters.base", "modicum.adapters.attached_adapter"),
    ("modicum.compress.base", "modicum.compress.compressed_model"),
    ("modicum.memory.base", "modicum.memory.activations"),
}
# The files that name what torch and transformers call private, and the private names that all of
# PyTorch's users rely on.
PRIVATE = "modicum.core.torch_private"
PRIVATE_OF_COMPILER = "modicum.core.torch_compiler"
PRIVATE_OF_TRANSFORMERS = "modicum.models.transformers.private"
SEMI_PUBLIC = {
    *("_parameters", "_buffers", "_modules", "_save_to_state_dict", "_load_from_state_dict"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
}


def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its name."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """The package's modules that a module imports when it runs, in functions too."""
    for_types = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= whole or ({node.module} & known)
    return found


def test_modules_import_each_other_in_one_direction() -> None:
    trees = modules()
    graph = {
        name: {
            other
            for other in imported(tree, set(trees))
            if (name, other) not in UPWARDS and other not in (name, "modicum")
        }
        for name, tree in trees.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(trees)


def test_type_checkers_are_shown_the_methods_of_the_catalog() -> None:
    """If this fails: python scripts/stubs.py."""
    spec = importlib.util.spec_from_file_location("stubs", ROOT / "scripts" / "stubs.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.stubs()
    assert len(found) >= 5
    for file, text in found.items():
        listed = re.findall(r"import (\w+) as", file.read_text(encoding="utf-8"))
        assert listed == re.findall(r"import (\w+) as", text), file


@pytest.mark.parametrize("room", ["adapters", "comm", "compress", "memory", "optim"])
def test_a_room_has_the_classes_of_its_methods(room: str) -> None:
    package = importlib.import_module(f"modicum.{room}")
    for record in catalog().values():
        if record.room == room:
            assert getattr(package, record.class_name).info.name == record.name
            assert record.class_name in package.__all__
            assert record.class_name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing


def test_a_type_s_name_means_one_thing() -> None:
    places = defaultdict(set)
    for module, tree in modules().items():
        for node in tree.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if name[0].isupper() and not name.isupper():
                    places[name].add(module)
    assert {name: sorted(where) for name, where in places.items() if len(where) > 1} == {}


def private_imports(tree: ast.Module) -> set[str]:
    """What of torch a module imports from private modules, or by private names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("torch.") and "._" in name}


def private_names(tree: ast.Module, *, strangers: bool = True) -> set[str]:
    """The private attributes that a module reads or sets.

    Args:
        strangers: only those that the module has not defined itself.
    """
    own, read = {"_exit"}, set()  # os._exit
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            (own if of_self or of_super else read).add(node.attr)
    return {name for name in read - (own if strangers else set()) if not name.startswith("__")}


def test_what_torch_calls_private_is_named_in_one_file() -> None:
    trees = modules()
    gathered = private_names(trees.pop(PRIVATE), strangers=False)
    gathered |= private_names(trees.pop(PRIVATE_OF_COMPILER), strangers=False)
    gathered |= private_names(trees.pop(PRIVATE_OF_TRANSFORMERS), strangers=False)
    assert {"_cdata", "_version", "_base", "_C"} <= gathered
    found = {
        name: private_imports(tree)
        | (private_names(tree) - SEMI_PUBLIC)
        | (private_names(tree, strangers=False) & gathered)
        for name, tree in trees.items()
    }
    assert {name: sorted(names) for name, names in found.items() if names} == {}


def test_private_parts_of_torch_are_noticed() -> None:
    text = """
import torch._dynamo.config
from torch._C import _profiler
from torch.distributed.tensor._utils import compute
from torch.optim import Optimizer
class Mine:
    def __init__(self, tensor):
        self._version, self._mine = tensor._version, tensor.storage()._cdata
        tensor._mine, tensor.__dict__
"""
    tree = ast.parse(text)
    assert private_imports(tree) == {
        "torch._dynamo.config", "torch._C._profiler", "torch.distributed.tensor._utils.compute"
    }  # fmt: skip
    assert private_names(tree) == {"_cdata"}
    assert private_names(tree, strangers=False) == {"_cdata", "_version", "_mine"}
