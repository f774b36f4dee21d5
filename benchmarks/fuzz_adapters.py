"""Does any adapter folder make `load` do anything but load it, or say in a sentence why not?

Each input is a folder that was saved, of one method in one format, with something spoilt. It must
be loaded as it says, or refused with an InputError after which the model is as it was: the same
modules, tensors to the bit, hooks and flags. No other exception, no hang, no memory that grows with
a number in a file. Numbers are drawn from the seed, so

    python benchmarks/fuzz_adapters.py --seed S --only N

does input N again. What commands make of such folders is a family of `fuzz.py`.

    python benchmarks/fuzz_adapters.py [--seed S] [--minutes M] [--only N ...]
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import alone, say, write_result
from fuzz_tensors import spoil
from fuzz_world import Folder, save_adapters
from safetensors.torch import load_file
from torch import Tensor, nn

import modicum
from modicum.adapters import load
from modicum.adapters.names import plain_name
from modicum.adapters.native_files import CONFIG, WEIGHTS
from modicum.core.errors import FoundWanting, InputError
from modicum.core.units import format_duration
from modicum.proofs.contracts.adapters.subjects import llama, tokens

_PACKAGE = Path(modicum.__file__).parent
LIMIT_SECONDS = 10
MEMORY = 2**30  # of address space in addition to what the process has before it begins


class Fuzzer:
    """The folders, the model that they are for, and what it gives."""

    def __init__(self, work: Path, seed: int) -> None:
        self.seed, self.work = seed, work
        self.folders = save_adapters(lambda: llama(layers=1), work)
        self.base, self.ids = llama(layers=1), tokens()

    def do(self, number: int) -> tuple[Folder, str, str, list[str]]:
        """Do one input: of what it was, how it was spoilt, how it ended, and what is wrong."""
        random = Random(f"{self.seed}/{number}")
        folder = random.choice(self.folders)
        spoilt = self.work / "spoilt"
        _remove(spoilt)
        shutil.copytree(folder.path, spoilt)
        how = spoil(random, spoilt)
        ended, wrong = self.tried(spoilt)
        return folder, how, ended, wrong

    def tried(self, folder: Path) -> tuple[str, list[str]]:
        """How loading a folder ends: `loaded`, or what was said; and what is wrong with it."""
        model = copy.deepcopy(self.base)
        before = looks(model)
        try:
            with limited(LIMIT_SECONDS), warnings.catch_warnings():
                warnings.simplefilter("error")
                adapter = load(model, folder, weights=self.weight)
        except InputError as error:
            said = str(error)
            wrong = ["a message of several lines"] if "\n" in said else []
            return said, wrong + [f"refused, and {what}" for what in differs(before, looks(model))]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return traceback.format_exc(), [where(error)]
        try:
            with limited(LIMIT_SECONDS):
                return "loaded", self.is_loaded(model, adapter, folder)
        except Exception as error:
            return traceback.format_exc(), [f"loaded, then {where(error)}"]

    def weight(self, name: str) -> Tensor:
        """The base's own weight, as its file would give it."""
        return self.base.get_submodule(name).get_parameter("weight").detach().clone()

    def is_loaded(self, model: Any, adapter: Any, folder: Path) -> list[str]:
        """What is wrong with an adapter that was loaded: it must be what the folder says."""
        wrong = []
        if (folder / CONFIG).exists():
            stored = load_file(folder / WEIGHTS)
            own = {plain_name(key): value for key, value in adapter.state_dict().items()}
            kept = {key: value for key, value in stored.items() if not key.startswith("base:")}
            if own.keys() != kept.keys():
                wrong.append("loaded, and its names are not those of the file")
            elif any(not same(own[key], kept[key].to(own[key])) for key in own):
                wrong.append("loaded, and its numbers are not those of the file")
        given = model(self.ids)
        if not given.isfinite().all():  # as of numbers near the largest
            return wrong
        again, saved = copy.deepcopy(self.base), self.work / "again"
        _remove(saved)
        adapter.save(saved)
        load(again, saved, weights=self.weight)
        if (again(self.ids) - given).abs().max() > 1e-3 * given.abs().max():
            wrong.append("loaded, saved and loaded again it computes something else")
        adapter.detach()
        left = differs(looks(self.base), looks(model), near=1e-4)
        return wrong + [f"detached, and {what}" for what in left]


def looks(model: nn.Module) -> dict[str, Any]:
    """All that a model is: modules with their classes, hooks and flags, and tensors."""
    modules = {
        name: (
            type(module),
            module.training,
            sorted(module.__dict__),
            [
                list(hooks)
                for key, hooks in sorted(module.__dict__.items())
                if key.endswith("_hooks")
            ],
        )
        for name, module in model.named_modules()
    }
    tensors = {name: t.detach().clone() for name, t in model.state_dict(keep_vars=True).items()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return {"modules": modules, "tensors": tensors, "flags": flags}


def differs(one: dict[str, Any], other: dict[str, Any], near: float = 0.0) -> list[str]:
    """In which words two looks at a model differ."""
    found = [f"its {key} differ" for key in ("modules", "flags") if one[key] != other[key]]
    left, right = one["tensors"], other["tensors"]
    close = left.keys() == right.keys() and all(
        same(t, right[n]) or (near and bool((t - right[n]).abs().max() <= near))
        for n, t in left.items()
    )
    return found if close else [*found, "its tensors differ"]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit, where none is a number too."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(
        torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7)) if one.is_floating_point()
        else torch.equal(one, other)
    )  # fmt: skip


def where(error: BaseException) -> str:
    """The last place of modicum's own in a stack trace, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    at = f"{Path(own[-1].filename).name} {own[-1].name}: " if own else ""
    said = re.sub("[0-9]+", "0", str(error).split("\n")[0])[:90]
    return f"{at}{type(error).__name__}: {said}"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in what takes longer; end the process where even that is not heard."""

    def late(*_: Any) -> None:
        raise TimeoutError("no end in time")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Fuzz for a while, or do some inputs again."""
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="modicum-fuzz-") as work:
        fuzzer = Fuzzer(Path(work), arguments.seed)
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY, has + MEMORY))
        if arguments.only:
            wrong = [number for number in arguments.only if not _again(fuzzer, number)]
            raise SystemExit(FoundWanting.exit_code if wrong else 0)
        _fuzz(fuzzer, arguments)


def _fuzz(fuzzer: Fuzzer, arguments: argparse.Namespace) -> None:
    begun, finds = time.monotonic(), list[dict[str, Any]]()
    folders: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    known: set[str] = set()
    for number in count(arguments.first):
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        folder, how, ended, wrong = fuzzer.do(number)
        folders[f"{folder.name}, {folder.form}"] += 1
        ends["loaded" if ended == "loaded" else "refused"] += not wrong
        if wrong:
            finds.append({"number": number, "folder": folder.path.name, "how": how, "wrong": wrong})
            if not set(wrong) <= known:
                known |= set(wrong)
                say(f"{number}: {folder.path.name}: {how}\n    {'; '.join(wrong)}")
    seconds = time.monotonic() - begun
    say(
        f"{folders.total()} inputs in {format_duration(seconds)}, {ends['loaded']} loaded, "
        f"{ends['refused']} refused, {len(finds)} finds of {len(known)} kinds"
    )
    if arguments.write:
        figures = {
            "inputs": folders.total(),
            "finds": len(finds),
            "seconds": seconds,
            "folders": dict(sorted(folders.items())),
            "ends": dict(ends),
            "found": finds,
        }
        settings = {"seed": fuzzer.seed, "minutes": arguments.minutes, "limit": LIMIT_SECONDS}
        with alone():
            write_result("fuzz_adapters", figures, settings)
    if finds:
        raise SystemExit(FoundWanting.exit_code)


def _again(fuzzer: Fuzzer, number: int) -> bool:
    folder, how, ended, wrong = fuzzer.do(number)
    print(f"{number}: {folder.path.name}: {how}\n  {'; '.join(wrong) or 'nothing is wrong'}")
    print(ended)
    return not wrong


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for path in [folder, *folder.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="which inputs are drawn")
    parser.add_argument("--minutes", type=float, default=10, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="do these inputs again")
    parser.add_argument("--write", action="store_true", help="write the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
