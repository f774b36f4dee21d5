"""Virtual environments for the matrix's rows: made once, with what modicum needs and without it.

An environment is shared by rows, so no row's copy may be installed in it. A row lays a small
environment of its own over it: the row's copy, installed as `make install` does, and a `.pth` file
that points to the shared one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import say

EXTRAS = ("cli", "hf", "proofs")
TOOLS = ("hatchling", "hypothesis", "pytest", "pytest-xdist")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_SECONDS = 1800
# Ways to the network are the machine's, not the row's.
_NETWORK = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")


class NotMade(Exception):
    """An environment could not be made; `missing` where its wheel is not published for it."""

    def __init__(self, reason: str, *, missing: bool = False) -> None:
        super().__init__(reason)
        self.missing = missing


@dataclass(frozen=True)
class Environment:
    """What is installed: for which Python, of which wheel of PyTorch, at which versions."""

    checkout: Path
    cache: Path
    python: str
    minor: int
    wheel: str
    lowest: bool

    @property
    def folder(self) -> Path:
        """Where it is kept; another place when what it is made from changes."""
        versions = "lowest" if self.lowest else "pinned"
        pins = self._constraints.read_text(encoding="utf-8")
        content = json.dumps([_requirements(self.checkout), self.python, pins])
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return self.cache / "environments" / f"3.{self.minor}-{self.wheel}-{versions}-{digest}"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return self.folder / "lib" / f"python3.{self.minor}" / "site-packages"

    def make(self) -> None:
        """Install what is not there yet.

        Raises:
            NotMade: pip failed, with its last line.
        """
        done = self.folder / ".installed"
        if done.exists():
            return
        say(f"making {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run([self.python, "-m", "venv", str(self.folder)], dict(os.environ))
        words = ["--requirement", str(self._required()), "--constraint", str(self._constraints)]
        try:
            self._pip(words)
        except NotMade:
            if self.wheel != "cpu":
                raise
            self._pip([*words, "--extra-index-url", CPU_INDEX])
        done.touch()

    @property
    def _constraints(self) -> Path:
        """The file of exact versions."""
        return self.checkout / f"constraints{'-lowest' if self.lowest else ''}.txt"

    def _required(self) -> Path:
        """A file of requirements: what modicum needs and what tests it, PyTorch as its build."""
        lines = [*_requirements(self.checkout), *TOOLS]
        if self.wheel == "cpu":
            text = self._constraints.read_text(encoding="utf-8")
            lines += [f"{line}+cpu" for line in text.splitlines() if line.startswith("torch==")]
        file = self.folder / "requirements.txt"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def _pip(self, words: Sequence[str]) -> None:
        """Run pip; where its default wheels are wanted, without any setting of the user's."""
        pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--no-input"]
        with tempfile.TemporaryDirectory() as home:
            environment = dict(os.environ)
            if self.wheel == "default":
                kept = {name: value for name, value in os.environ.items() if name in _NETWORK}
                environment = {**kept, "HOME": home, "PATH": os.environ.get("PATH", os.defpath)}
            # Rows of several Pythons share most of three gigabytes.
            environment["PIP_CACHE_DIR"] = str(self.cache / "pip")
            self._run([*pip, "--disable-pip-version-check", *words], environment)

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        with open(self.folder / "install.log", "a", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=PIP_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise NotMade(f"pip took longer than {PIP_SECONDS} s") from None
        if done.returncode:
            text = (self.folder / "install.log").read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            problems = [line for line in lines if line.startswith("ERROR: ")] or lines
            missing = self.wheel == "cpu" and "No matching distribution found for torch" in text
            raise NotMade(problems[-1] if problems else "no word", missing=missing)


def overlay(environment: Environment, checkout: Path, folder: Path) -> Path:
    """A virtual environment in `folder` with `checkout` installed; returns its Python.

    Raises:
        subprocess.CalledProcessError: the installation failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([environment.python, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python3.{environment.minor}" / "site-packages"
    # An import in a .pth file is run; a plain path would leave out the .pth files over there.
    line = f"import site; site.addsitedir({str(environment.packages)!r})\n"
    (packages / "shared.pth").write_text(line, encoding="utf-8")
    python = folder / "bin" / "python"
    words = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *words, "--editable", checkout],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return python


def _requirements(checkout: Path) -> list[str]:
    """What pyproject.toml says that modicum and its tests need, extras included."""
    with open(checkout / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    named = list(project["dependencies"])
    for extra in EXTRAS:
        named += project["optional-dependencies"][extra]
    return [one for one in dict.fromkeys(named) if not one.startswith("modicum[")]
