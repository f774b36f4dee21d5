"""Decompositions of base weights, made once: SVD, exact or randomized, and LU with permutation.

They take seconds to minutes a model and depend on the weight's numbers alone. Within
`bases_kept_in(folder)` they are kept there, a folder a base model, in files that are mapped into
memory; a file is known by a digest of the weight. What comes from a file has the bits of what was
made, so nothing that is computed depends on whether it was there. Ranks share the work by
`core.ranks.turns.by_turns`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from modicum.core.digest import tensors_digest
from modicum.core.errors import InputError
from modicum.core.files import publish_file, user_cache
from modicum.core.layers.truncated_svd import truncated_svd
from modicum.core.weight_digests import weight_digests

# Of the disk's free bytes, the part that is taken at most.
_SHARE_OF_FREE = 0.1
_CACHE = "bases"
_NAME = re.compile(r"(svd|lu)-[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class _Kept:
    """Where decompositions are kept: `most` bytes there, or in all folders of the user's cache."""

    folder: Path
    most: int


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


def own_folder(model_folder: str | Path) -> Path:
    """The folder in the user's cache for decompositions of a model's weights, by their digests.

    Raises:
        InputError: the model's files cannot be read.
    """
    digests = json.dumps(weight_digests(Path(model_folder)), sort_keys=True)
    return user_cache(_CACHE) / hashlib.sha256(digests.encode()).hexdigest()[:32]


@contextmanager
def bases_kept_in(folder: str | Path | None, *, most: int | None = None) -> Iterator[None]:
    """Keep the decompositions that are made in a `with` block in a folder, and take them from it.

    Args:
        folder: of one base model, as `own_folder` gives one; None: nothing is kept.
        most: bytes that may be kept there, in the user's cache for all models together; what was
            not used for longest goes. None: a tenth of what the disk has free.

    >>> import tempfile
    >>> weight = torch.randn(6, 4)
    >>> with tempfile.TemporaryDirectory() as root, bases_kept_in(f"{root}/model"):
    ...     first, again = kept_svd(weight, 2), kept_svd(weight, 2)
    ...     len(list(Path(root).glob("model/*.safetensors")))
    1
    >>> all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    True
    """
    kept = None
    if folder is not None:
        path = Path(folder)
        if most is None:
            most = _share_of_free(path)
        kept = _Kept(path, most)
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def kept_svd(
    matrix: Tensor,
    rank: int | None = None,
    iterations: int | None = None,
    *,
    seed: int = 0,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """`truncated_svd`, or what it gave before for the same numbers.

    An exact one of a lower rank is read off one of a higher rank.
    """
    rank = min(matrix.shape) if rank is None else rank
    words = ("svd",) if iterations is None else ("svd", str((rank, iterations, seed, name)))

    def make() -> dict[str, Tensor]:
        left, values, right = truncated_svd(matrix, rank, iterations, seed=seed, name=name)
        return {"left": left, "values": values, "right": right}

    found = _made_once(matrix, words, make, lambda kept: len(kept["values"]) >= rank)
    return found["left"][:, :rank], found["values"][:rank], found["right"][:rank]


def kept_lu(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(order [m], L [m, k], U [k, n]) with matrix[order] = L U, k = min(m, n).

    L has ones on its diagonal and nothing above; U nothing below. Rows are ordered so that every
    entry of L is at most 1 in size (partial pivoting).

    >>> order, lower, upper = kept_lu(torch.tensor([[1.0, 2.0], [4.0, 4.0]]))
    >>> order, lower @ upper
    (tensor([1, 0]), tensor([[4., 4.],
            [1., 2.]]))
    """

    def make() -> dict[str, Tensor]:
        permutation, lower, upper = torch.linalg.lu(matrix)
        return {"order": permutation.argmax(0), "lower": lower, "upper": upper}

    found = _made_once(matrix, ("lu",), make, lambda kept: True)
    return found["order"], found["lower"], found["upper"]


def _made_once(
    matrix: Tensor,
    words: tuple[str, ...],
    make: Callable[[], Mapping[str, Tensor]],
    serves: Callable[[Mapping[str, Tensor]], bool],
) -> Mapping[str, Tensor]:
    """What a file of the cache holds for a matrix, else what is made now, and kept."""
    kept = _kept.get()
    if kept is None:
        return make()
    digest = tensors_digest([("matrix", matrix)], *words)
    file = kept.folder / f"{words[0]}-{digest[:32]}.safetensors"
    with suppress(OSError, SafetensorError, KeyError):  # not there, or damaged: made anew
        with safe_open(file, framework="pt", device=str(matrix.device)) as opened:
            found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if serves(found):
            with suppress(OSError):  # others may read what they may not change
                file.touch()
            return found
    made = {key: value.contiguous() for key, value in make().items()}
    with suppress(OSError, InputError):  # a full disk costs time, and nothing else
        if _made_room(kept, sum(value.nbytes for value in made.values())):
            with publish_file(file) as temporary:
                save_file(made, temporary)
    return made


def _share_of_free(path: Path) -> int:
    """The bytes that may be taken where a folder is or will be; none where nobody may look."""
    # Unlike a path's own `exists`, this is false where a folder above may not be entered.
    above = (one for one in (path, *path.absolute().parents) if os.path.exists(one))
    try:
        return int(_SHARE_OF_FREE * shutil.disk_usage(next(above)).free)
    except OSError:
        return 0


def _made_room(kept: _Kept, size: int) -> bool:
    """Whether a file of this size may be kept; what was not used for longest goes for it."""
    if size > kept.most:
        return False
    ours = kept.folder.parent == user_cache(_CACHE)
    listed = kept.folder.parent.glob("*/*") if ours else kept.folder.glob("*")
    files = [
        (file.stat().st_mtime, file.stat().st_size, file)
        for file in listed
        if _NAME.fullmatch(file.name)
    ]
    there = sum(each for _, each, _ in files)
    for _, each, file in sorted(files):
        if there + size <= kept.most:
            break
        file.unlink(missing_ok=True)
        there -= each
    return there + size <= kept.most
