"""Code of a model's own folder, run where somebody asks for it by a flag, and nowhere else.

transformers imports it, from a copy in its own cache, and its tables then know the model as one of
theirs. Nothing here runs because a folder wishes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import read_json, regular, user_cache
from modicum.models.config_checks import FORMED
from modicum.models.transformers.private import known_types, register

FLAG = "model.trust_remote_code"
_CONFIG, _AUTO = "config.json", "auto_map"
_MODELS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")


@dataclass(frozen=True)
class ModelCode:
    """The Python files of a model's folder.

    Args:
        folder: that of its config.json.
        files: those that config.json names, and what they import of the folder.
    """

    folder: Path
    files: tuple[Path, ...]

    def digest(self) -> str:
        """Of names and bytes of all files."""
        found = hashlib.sha256()
        for file in self.files:
            found.update(f"{file.relative_to(self.folder)}\0".encode() + file.read_bytes() + b"\0")
        return found.hexdigest()


_running: dict[str, tuple[str, ModelCode]] = {}


def named_files(raw: Mapping[str, Any]) -> list[str]:
    """The Python files that a config.json names as the model's code; none is run or read.

    >>> named_files({"auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}})
    ['own.py']
    """
    named = raw.get(_AUTO)
    references = named.values() if isinstance(named, Mapping) else ()
    plain = [each for each in references if isinstance(each, str)]
    return sorted({f"{each.rpartition('.')[0]}.py" for each in plain})


def has_own_code(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json names code of a model that transformers itself does not have."""
    kind = _kind(raw)
    return bool(named_files(raw)) and (kind in _running or kind not in known_types())


def trust(folder: str | Path) -> ModelCode:
    """Run the code of a model's folder, so that its model can be built; with a warning.

    It is run once in a process: by then it can do whatever the user can.

    Raises:
        InputError: the folder has no such code, or transformers has the model itself; a file is
            missing or of another repository; the code fails, or other code for the same type of
            model runs already.
    """
    folder = Path(folder)
    raw = read_json(folder / _CONFIG)
    kind = _kind(raw)
    try:
        code = _found(folder, raw)
        digest = code.digest()
        if kind in _running:
            if _running[kind][0] != digest:
                problem = "other code for a model of this type runs in this process; start another"
                raise InputError(problem, value=kind)
            return code
        if kind in known_types():
            problem = "transformers itself has such a model, which is what is trained; leave it out"
            raise InputError(problem, value=kind)
        names = ", ".join(str(file) for file in code.files)
        warnings.warn(f"{FLAG}: running the code of a model's folder: {names}", stacklevel=2)
        _run(code, raw)
    except InputError as error:
        raise error.located(file=folder / _CONFIG, field=FLAG) from None
    _running[kind] = (digest, code)
    return code


def code_of(kind: str) -> ModelCode | None:
    """The code that was run for a type of model, if any was."""
    return _running[kind][1] if kind in _running else None


def copy_code(raw: Mapping[str, Any], folder: Path) -> None:
    """Put the code that a config.json names next to it, where that code was run here."""
    code = code_of(_kind(raw))
    if code is None:
        return
    for file in code.files:
        target = folder / file.relative_to(code.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _kind(raw: Mapping[str, Any]) -> str:
    """The type of a config.json's model, also where modicum wrote it with forms of layers."""
    return str(raw.get("model_type")).removeprefix(FORMED if "forms" in raw else "")


def _found(folder: Path, raw: Mapping[str, Any]) -> ModelCode:
    """The code that a config.json names; nothing is run."""
    named = raw.get(_AUTO)
    if not isinstance(named, Mapping) or not {"AutoConfig"} < named.keys():
        problem = "config.json names no code for configuration and model in auto_map; leave it out"
        raise InputError(problem)
    from transformers.dynamic_module_utils import get_relative_import_files

    files: dict[Path, None] = {}
    for name in named_files(raw):
        if "--" in name or Path(name).name != name:
            problem = "only code that lies in the model's folder is run, and this is elsewhere"
            raise InputError(problem, value=name)
        try:
            regular(folder / name)
            inner = get_relative_import_files(folder / name)
        except OSError as error:
            raise InputError(
                f"cannot be read ({error.strerror})", value=str(error.filename)
            ) from None
        files |= dict.fromkeys([folder / name, *map(Path, inner)])
    return ModelCode(folder, tuple(sorted(files)))


def _run(code: ModelCode, raw: Mapping[str, Any]) -> None:
    """Have transformers import it, and enter its classes into its tables."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    named = raw[_AUTO]
    try:
        with _turn():
            made = {
                name: get_class_from_dynamic_module(named[name], code.folder, local_files_only=True)
                for name in ("AutoConfig", *_MODELS)
                if name in named
            }
        register(_kind(raw), made)
    except Exception as error:  # whatever a stranger's code raises
        said = " ".join(f"{type(error).__name__}: {error}".split())[:240]
        raise InputError(f"the code of the model's folder fails ({said})") from None


@contextmanager
def _turn() -> Iterator[None]:
    """Ranks copy the code into transformers' cache in turns, where the disk keeps locks."""
    folder = user_cache("code")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
