"""What `make install` says and does before pip fetches PyTorch, with pip's answers made up."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU, CUDA = ["sympy>=1.13"], ["sympy>=1.13", 'nvidia-nccl-cu13==2.29; platform_system == "Linux"']
WARNING = "This machine has no NVIDIA driver, and pip's PyTorch {} the libraries of CUDA"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """scripts/find_torch.py, on a Linux without a driver and in an empty folder."""
    spec = importlib.util.spec_from_file_location("find_torch", ROOT / "scripts/find_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_driver", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path)
    return module


def report(requires: list[str] | None) -> str:
    """pip's report: nothing to do, or one wheel with these requirements."""
    url = "https://index/torch-2.13.0%2Bcpu-cp311.whl"
    wheel = {"download_info": {"url": url}, "metadata": {"requires_dist": requires}}
    return json.dumps({"install": [] if requires is None else [wheel]})


def fake_pip(folder: Path, *, here: str | None, there: str | None) -> str:
    """A pip that answers so without the index (`here`) and with it (`there`); None is a failure."""
    pip = folder / "pip"
    lines = ["#!/bin/sh", f'echo "$@" >> "{folder}/asked"']
    lines += ['for word; do [ "$last" = --report ] && report=$word; last=$word; done']
    for option, answer in (("--no-index", here), ("--dry-run", there)):
        act = "exit 1" if answer is None else f"echo '{answer}' > $report; exit 0"
        lines.append(f'case "$*" in *{option}*) {act};; esac')
    pip.write_text("\n".join([*lines, "exit 1", ""]))
    pip.chmod(0o755)
    return str(pip)


@pytest.mark.parametrize(
    ("here", "there", "verb"),
    [
        pytest.param(None, CUDA, "brings", id="the index has CUDA"),
        pytest.param(None, CPU, None, id="the index has the small one"),
        pytest.param(CPU, CUDA, None, id="the small one is here"),
        pytest.param(CUDA, CPU, "brings", id="a CUDA wheel is here, its libraries are not"),
    ],
)
def test_gigabytes_are_announced_where_they_come(
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    here: list[str] | None,
    there: list[str],
    verb: str | None,
) -> None:
    local = None if here is None else report(here)
    pip = fake_pip(tmp_path, here=local, there=report(there))
    script.main("demo", "log", [pip, "install"])
    said = capsys.readouterr().out
    assert ("no NVIDIA driver" in said) is (verb is not None)
    if verb:
        assert WARNING.format(verb) in said
        assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo\n" in said
    assert ("Using torch-2.13.0+cpu-cp311.whl" in said) is (here is not None)
    calls = (tmp_path / "asked").read_text().splitlines()
    assert "--no-index" in calls[0]
    assert len(calls) == (2 if here is None else 1)


def test_nothing_is_said_of_a_torch_that_is_installed_or_when_pip_fails(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = fake_pip(tmp_path, here=report(None), there=report(CUDA))
    script.main("demo", "log", [pip])
    script.main("demo", "log", [fake_pip(tmp_path, here=None, there=None)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("other", ["driver", "macOS"])
def test_nothing_is_said_where_cuda_is_of_use_or_never_comes(
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    other: str,
) -> None:
    if other == "driver":
        monkeypatch.setattr(script, "has_driver", lambda: True)
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    script.main("demo", "log", [fake_pip(tmp_path, here=None, there=report(CUDA))])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("says", "verb"),
    [
        ("", "may bring"),
        (
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)",
            "may bring",
        ),
        ("  Downloading https://index/torch-2.13.0%2Bcu128-cp311-cp311-linux.whl (2 GB)", "brings"),
        ("  Downloading https://index/torch-2.13.0%2Bcpu-cp311-cp311-linux.whl (190 MB)", None),
        ("  Using cached torch-2.13.0+cpu-cp311-cp311-linux.whl (190 MB)", None),
    ],
)
def test_a_pip_that_would_download_to_answer_is_stopped(
    script: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    verb: str | None,
) -> None:
    pip = fake_pip(tmp_path, here=None, there=report(CPU))
    slow = Path(pip)
    act = f"*--dry-run*) echo '{says}'; exec sleep 60;"
    slow.write_text(slow.read_text().replace("*--dry-run*)", act))
    monkeypatch.setattr(script, "PATIENCE", 60 if says else 0.3)
    script.main("demo", "log", [pip])
    said = capsys.readouterr().out
    assert WARNING.format(verb) in said if verb else said == ""


def test_fetching_metadata_is_not_fetching_a_wheel(script: Any) -> None:
    line = "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)"
    assert script.WHEEL_BEGUN.search(line) is None


def test_a_folder_of_wheels_is_looked_through(script: Any, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    script.main("demo", "log", [fake_pip(tmp_path, here=report(CPU), there=None)])
    assert "--find-links wheels" in (tmp_path / "asked").read_text()


def test_make_asks_before_it_installs(script: Any, tmp_path: Path) -> None:
    """The Makefile's own recipe, with an environment whose Python is a shell script."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    pip = fake_pip(tmp_path, here=report(CPU), there=None)
    Path(pip).write_text(Path(pip).read_text().replace("exit 1", "exit 0"))
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$1" in scripts/*) exec "{sys.executable}" "$@";; esac\n'
        f'case "$*" in "-m pip"*) exec "{pip}" "$@";; esac\n'
    )
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", "install", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Using torch-2.13.0+cpu-cp311.whl" in done.stdout
    stages = [
        line for line in done.stdout.splitlines() if re.fullmatch(r"\d of 2: .*: \d+ s", line)
    ]
    assert [stage[:6] for stage in stages] == ["1 of 2", "2 of 2"]
    assert "\r" not in done.stdout
    calls = (tmp_path / "asked").read_text().splitlines()
    assert "--no-index" in calls[0]
    assert calls[1].endswith("torch hatchling")
    assert calls[2].endswith("--editable .[dev]")
    assert all("-c constraints.txt" in call for call in calls)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("Collecting numpy==2.4\n  Downloading https://i/numpy-2.4-cp311.whl (18 MB)\nx\n",
         "downloading numpy-2.4-cp311.whl (18 MB)"),
        ("Collecting numpy\nInstalling collected packages: numpy, torch, rich\n",
         "installing 3 packages"),
        ("Collecting numpy>=2 (from scipy)\n", "collecting numpy>=2 (from scipy)"),
    ],
)  # fmt: skip
def test_a_stage_says_what_pip_is_doing(tmp_path: Path, log: str, said: str) -> None:
    stage = runpy.run_path(str(ROOT / "scripts" / "install_stage.py"))
    (tmp_path / "log").write_text(log)
    assert stage["doing"](tmp_path / "log") == said


def test_a_stage_that_fails_says_so_and_has_its_status(tmp_path: Path) -> None:
    script, log = str(ROOT / "scripts" / "install_stage.py"), str(tmp_path / "log")
    words = [sys.executable, script, "1 of 1", log]
    command = ["sh", "-c", "echo broken; exit 3"]
    done = subprocess.run([*words, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert re.fullmatch(r"1 of 1: \d s, failed\n", done.stdout)
    assert (tmp_path / "log").read_text() == "broken\n"
