"""Models of the Hugging Face hub, in the hub's own cache on this machine.

A spelling is `hub:OWNER/NAME`, or `hub:OWNER/NAME,revision=REVISION`. Only safetensors, JSON and
the tokenizer's text files are downloaded, and code where it was asked for; weights apart from the
rest, since a plan needs none. What is in the cache is used without network, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import json_object
from modicum.models.safetensors_file import INDEX, WEIGHTS

PREFIX = "hub:"
_SPELLING = "hub:OWNER/NAME, or hub:OWNER/NAME,revision=REVISION"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"[\w.-]+\.safetensors")  # no pattern, and nothing outside of the folder
# Next to config.json: what tokenizers and generation read. Names, as patterns match in folders too.
_SMALL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class HubModel:
    """A model of the hub.

    Args:
        name: OWNER/NAME.
        revision: a branch, a tag or a commit; None for the newest.
    """

    name: str
    revision: str | None = None

    @classmethod
    def parsed(cls, spelling: str) -> HubModel:
        """What a recipe spells so.

        Raises:
            InputError: it is spelled otherwise.

        >>> HubModel.parsed("hub:openai-community/gpt2,revision=main")
        HubModel(name='openai-community/gpt2', revision='main')
        """
        found = re.fullmatch(
            r"(\w[\w.-]*/\w[\w.-]*)(?:,revision=([\w./-]+))?", spelling.removeprefix(PREFIX)
        )
        if found is None:
            raise InputError("names no model of the hub", value=spelling, allowed=_SPELLING)
        return cls(*found.groups())

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def spelling(self) -> str:
        """As a recipe has it."""
        return f"{PREFIX}{self.name}" + (f",revision={self.revision}" if self.revision else "")

    def at(self, commit: str) -> HubModel:
        """This model at a commit."""
        return replace(self, revision=commit)


def commit_of(asked: str, other: str) -> str | None:
    """The commit at which another spelling has a model whose commit is left open.

    >>> commit_of("hub:a/b", "hub:a/b,revision=" + 40 * "0") == 40 * "0"
    True
    """
    if not (asked.startswith(PREFIX) and other.startswith(PREFIX)):
        return None
    model, found = HubModel.parsed(asked), HubModel.parsed(other)
    same = model.name == found.name and found.pinned and not model.pinned
    return found.revision if same else None


def hub_folder(spelling: str, *, code: bool = False) -> Path:
    """The folder of a model in the hub's cache, with all but its weights.

    Weights that an interrupted download has left are completed.

    Args:
        code: whether Python files are downloaded too.

    Raises:
        InputError: the library is missing, there is no such model, or the hub cannot be reached and
            the cache does not have it; in one sentence.
    """
    asked = HubModel.parsed(spelling)
    patterns = (*_SMALL, "*.py") if code else _SMALL
    folder = _downloaded(asked, patterns)
    if not (folder / "config.json").is_file():
        raise InputError("this repository of the hub has no config.json", value=spelling)
    if _incomplete(folder):
        download_weights(asked.at(folder.name).spelling)
    return folder


def download_weights(spelling: str) -> Path:
    """Download the weights of a model into its folder in the hub's cache, where they are not there.

    Raises:
        InputError: as `hub_folder`; or the model has no safetensors, or an index of other files.
    """
    asked = HubModel.parsed(spelling)
    folder = _downloaded(asked, (INDEX,))
    _downloaded(asked, _shards(folder) or (WEIGHTS,))
    if _incomplete(folder) or not any((folder / name).is_file() for name in (INDEX, WEIGHTS)):
        raise InputError(
            f"this model of the hub has no {WEIGHTS}, and pickled weights are not read",
            value=spelling,
        )
    return folder


def _shards(folder: Path) -> tuple[str, ...]:
    """The files that the index of a model's weights names.

    Raises:
        InputError: it is damaged, or names other files.
    """
    if not (folder / INDEX).is_file():
        return ()
    named = json_object(folder / INDEX).get("weight_map")
    shards = list(named.values()) if isinstance(named, dict) else []
    strange = [each for each in shards if not isinstance(each, str) or not _SHARD.fullmatch(each)]
    if strange:
        problem = "names what is no file of safetensors in its folder"
        raise InputError(problem, file=folder / INDEX, value=strange[0])
    return tuple(sorted(set(shards)))


def _incomplete(folder: Path) -> bool:
    """Whether there are weights, and not all of them."""
    shards = _shards(folder)
    if shards:
        return not all((folder / name).is_file() for name in shards)
    return any(folder.glob("*.safetensors")) and not (folder / WEIGHTS).is_file()


def _downloaded(asked: HubModel, names: Sequence[str]) -> Path:
    """The folder with the files of these names, as many as there are in the repository."""
    hub = library("huggingface_hub", "hf", f"{PREFIX}{asked.name}: reading it")
    with _bars_on_terminals():
        try:
            found = hub.snapshot_download(
                asked.name, revision=asked.revision, allow_patterns=list(names)
            )
        except Exception as error:  # of HTTP, of values, of the system: they have no common base
            problem = _why(hub.errors, error)
            raise InputError(problem, value=asked.spelling) from error
    return Path(found)


def _why(errors: Any, error: Exception) -> str:
    """What an error of the hub's library says, as one sentence."""
    if isinstance(error, errors.GatedRepoError):
        return "the model's page on the hub asks for your consent first; then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private and needs `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model of the hub has no such revision"
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = "is not asked, as HF_HUB_OFFLINE is set" if _offline() else "cannot be reached"
        return f"the hub {offline}, and its cache on this machine does not have the model"
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"the hub's library cannot load it: {said[:240]}"


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    # A module of its own, which the package itself does not load.
    utils = library("huggingface_hub.utils", "hf", "a model of the hub: reading it")
    bars = not utils.are_progress_bars_disabled() and not sys.stderr.isatty()
    if bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            utils.enable_progress_bars()
