"""How the fuzzer spoils an adapter's folder: its tensors one by one, its words, its files.

Every function says in a few words what it did, for those who read a find.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_mutations import content, place
from safetensors.torch import load_file, save
from torch import Tensor

Tensors = dict[str, Tensor]
DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip
NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e38, -3e38, 1e-45, 0.0)
# What is far from any value of a configuration.
FAR: tuple[Any, ...] = (
    10**5, 10**9, 2**31, 2**63, 10**18, 10**400, -(10**9), 1e300, 1e-300, "1e9", "²", "\0",
    ["x"] * 2000, {"x": {"x": {}}}, [[[]]], True, None, "(" * 50, "(a+)+$", ".*", "all-linear",
)  # fmt: skip


def spoil(random: Random, folder: Path) -> str:
    """Spoil one thing in an adapter's folder, or two."""
    done = [_one(random, folder)]
    if random.random() < 0.2:
        done.append(_one(random, folder))
    return ", then ".join(done)


def _one(random: Random, folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        return "nothing is left"
    path = random.choice(files)
    kind = random.random()
    if kind < 0.06:
        return f"{path.name}: {place(random, path)}"
    if kind < 0.1:
        return f"{path.name}: {_another_kind(random, path)}"
    try:
        if path.suffix == ".safetensors" and kind < 0.65:
            return f"{path.name}: {_tensors(random, path)}"
        if path.suffix == ".json" and kind < 0.45:
            return f"{path.name}: {_far(random, path)}"
    except Exception as error:  # the first of two has left no file of its kind
        return f"{path.name}: {type(error).__name__}"
    return f"{path.name}: {content(random, path)}"


def _far(random: Random, path: Path) -> str:
    """A value of the configuration that is far from what it was."""
    root = json.loads(path.read_text())
    holder, key = random.choice(list(_places(root)))
    holder[key] = random.choice(FAR)
    path.write_text(json.dumps(root))
    return f"{key!r} is {str(holder[key])[:40]!r}"


def _places(node: Any) -> Any:
    for key in node if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


# What is in a file of another kind: one that runs what it holds when it is read, an archive's end,
# a single array.
_KINDS = {
    "pickle": b"\x80\x04c__builtin__\nprint\n(K\x01tR.",
    "zip": b"PK\x05\x06" + bytes(18),
    "numpy": b"\x93NUMPY\x01\0",
}


def _another_kind(random: Random, path: Path) -> str:
    """A file of another kind under the old name."""
    kind = random.choice(sorted({*_KINDS, "torch"}))
    if kind == "torch":  # as torch keeps tensors
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", _KINDS["pickle"])
            archive.writestr("archive/version", "3")
    else:
        path.write_bytes(_KINDS[kind])
    return f"now {kind}"


def _tensors(random: Random, path: Path) -> str:
    """One of the tensors changed, and the file well formed."""
    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    done = random.choice(_CHANGES)(random, tensors, name)
    made = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    path.write_bytes(save(made, metadata={"format": "pt"}))
    return f"{name}: {done}"


def _drop(random: Random, tensors: Tensors, name: str) -> str:
    del tensors[name]
    return "left out"


def _rename(random: Random, tensors: Tensors, name: str) -> str:
    parts = name.split(".")
    at = random.randrange(len(parts))
    parts[at] = random.choice(
        ("", "x", parts[at] + "x", parts[at].upper(), "shared", "base:a", "9")
    )
    new = ".".join(parts)
    tensors[new] = tensors.pop(name)
    return f"called {new!r}"


def _more(random: Random, tensors: Tensors, name: str) -> str:
    new = random.choice(
        ("x", "", "shared.x", f"{name}.x", "base:x", f"base:{name}", "lm_head.weight")
    )
    tensors[new] = tensors[name].clone()
    return f"there is {new!r} too"


def _dtype(random: Random, tensors: Tensors, name: str) -> str:
    dtype = random.choice(DTYPES)
    for key in [name] if random.random() < 0.5 else list(tensors):
        tensor = tensors[key].real if tensors[key].is_complex() else tensors[key]
        tensors[key] = tensor.to(dtype)
    return f"in {dtype}"


def _numbers(random: Random, tensors: Tensors, name: str) -> str:
    value, tensor = random.choice(NUMBERS), tensors[name].clone()
    if not tensor.numel():
        return "empty"
    value = value if tensor.is_floating_point() else -(2**7)
    if random.random() < 0.5:
        tensor.view(-1)[random.randrange(tensor.numel())] = value
    else:
        tensor.fill_(value)
    tensors[name] = tensor
    return f"numbers of {value}"


def _shape(random: Random, tensors: Tensors, name: str) -> str:
    tensor = tensors[name]
    tensors[name] = random.choice(
        (
            tensor.flatten(), tensor[None], tensor[..., None], tensor[:0],
            tensor.permute(*reversed(range(tensor.ndim))),
            torch.zeros(()), torch.cat([tensor.reshape(-1)] * 2), tensor.reshape(-1)[:1],
            tensor.repeat(2, *(1,) * (tensor.ndim - 1)) if tensor.ndim else tensor[None],
            torch.zeros((1,) * 30), torch.zeros(0, 2**40),
        )
    )  # fmt: skip
    return f"{tuple(tensor.shape)} became {str(tuple(tensors[name].shape))[:40]}"


def _exchange(random: Random, tensors: Tensors, name: str) -> str:
    other = random.choice(sorted(tensors))
    tensors[name], tensors[other] = tensors[other], tensors[name]
    return f"exchanged with {other}"


_CHANGES: tuple[Callable[[Random, Tensors, str], str], ...] = (
    _drop, _rename, _more, _dtype, _numbers, _shape, _exchange,
)  # fmt: skip
