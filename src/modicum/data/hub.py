"""Data sets of the Hugging Face hub, which the library `datasets` loads into Arrow files.

A spelling is `hub:OWNER/NAME`, with what `datasets.load_dataset` is asked for behind it:
`hub:openai/gsm8k,config=main,split=test`. A folder like a data set's repository is spelled by its
path, `hub:./gsm8k,split=test`. No code of a data set is run, and nothing is unpickled: what is read
is CSV, JSON, Parquet, Arrow or text.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library

PREFIX = "hub:"
_SPELLING = "hub:OWNER/NAME, or hub:./FOLDER, with ,config=, ,split= and ,revision= behind it"
_KEYS = ("config", "split", "revision")
# Readers of `datasets` that neither unpickle nor decode media; `cache` is what one of them made.
_READERS = ("csv", "json", "parquet", "arrow", "text", "cache")
_OLDEST = 4  # up to the version before it, `datasets` could run code of a data set


@dataclass(frozen=True)
class HubName:
    """A data set, and which part of it.

    Args:
        name: OWNER/NAME, or the path of a folder.
        config: one of several configurations that it has; None where there is one.
        split: one of its splits.
        revision: of its repository: a branch, a tag or a commit; None for the newest.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether the name is that of a folder here."""
        return self.name.startswith((".", "/", "~"))

    @classmethod
    def parsed(cls, spelling: str) -> HubName:
        """What a recipe spells so.

        Raises:
            InputError: it is spelled otherwise; slices of splits are not read.

        >>> HubName.parsed("hub:openai/gsm8k,config=main")
        HubName(name='openai/gsm8k', config='main', split='train', revision=None)
        """
        name, *settings = spelling.removeprefix(PREFIX).split(",")
        made = cls(name)
        if not made.is_folder and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise InputError("names no data set of the hub", value=spelling, allowed=_SPELLING)
        said: dict[str, str] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in _KEYS or key in said or not re.fullmatch(r"[\w./-]+", value):
                raise InputError(
                    f"cannot be read at {setting!r}; of a split all rows are taken",
                    value=spelling,
                    allowed=_SPELLING,
                    word=None if key in _KEYS else key,
                    candidates=_KEYS,
                )
            said[key] = value
        return cls(name, **said)


def hub_files(spelling: str) -> list[Path]:
    """The Arrow files of a data set, in their order, in the cache of `datasets`.

    They are downloaded and converted where they are not there. Without network, or with
    `HF_HUB_OFFLINE=1`, those that are there are taken.

    Raises:
        InputError: `datasets` is missing or older than 4, or cannot load the data set: with its
            reason in one sentence.
    """
    with said_by_datasets(spelling):
        rows = loaded(spelling)
        return [Path(file["filename"]) for file in rows.cache_files]


def loaded(spelling: str, *, streaming: bool = False) -> Any:
    """A data set as `datasets` has it: in its cache, or with `streaming` read as it is asked for.

    Raises:
        InputError: as `hub_files`.
    """
    asked = HubName.parsed(spelling)
    datasets = library("datasets", "hub", f"{spelling}: reading it")
    if int(datasets.__version__.split(".")[0]) < _OLDEST:
        raise InputError(
            f"datasets {datasets.__version__} may run code of a data set; "
            "pip install 'modicum[hub]' brings one that cannot",
            value=spelling,
        )
    name = str(Path(asked.name).expanduser()) if asked.is_folder else asked.name
    if asked.is_folder != Path(name).is_dir():
        raise InputError(
            "there is no such folder"
            if asked.is_folder
            else f"a folder of this name is here, and `datasets` would read it; for the folder "
            f"write hub:./{name}, for the hub work elsewhere",
            value=spelling,
        )
    with said_by_datasets(spelling), _quiet(datasets):
        builder = datasets.load_dataset_builder(name, asked.config, revision=asked.revision)
        reader = type(builder).__module__.rpartition(".")[2]
        if reader not in _READERS:
            raise InputError(
                f"the data set holds {reader}, which is not read here",
                value=spelling,
                allowed="CSV, JSON, Parquet, Arrow or text",
            )
        how = {"split": asked.split, "revision": asked.revision}
        more = {"streaming": True} if streaming else {}
        return datasets.load_dataset(name, asked.config, **how, **more)


@contextmanager
def said_by_datasets(spelling: str) -> Iterator[None]:
    """Whatever `datasets` raises, as one sentence."""
    try:
        yield
    except InputError:
        raise
    except ConnectionError as error:
        raise InputError(
            f"the hub cannot be reached, and the data set is not in the cache of `datasets` "
            f"({_sentence(error)})",
            value=spelling,
        ) from error
    except Exception as error:  # it has no base of its own: ValueError, RuntimeError, OSError, ...
        cause = error.__cause__ or error
        problem = f"`datasets` cannot load it: {_sentence(cause)}"
        raise InputError(problem, value=spelling) from error


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No lines about each try to reach the hub; bars of progress on terminals alone."""
    log = logging.getLogger("huggingface_hub")
    level, bars = log.level, not datasets.are_progress_bars_disabled()
    log.setLevel(logging.ERROR)
    if bars and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
