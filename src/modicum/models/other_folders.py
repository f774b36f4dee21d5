"""What a folder without a config.json is, where it is no model, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.run_folders import no_run

_ADAPTER = "adapter_config.json"


def no_model(folder: Path) -> InputError:
    """The refusal of a folder that has no config.json."""
    why = _why(folder)
    if why is None:
        return no_run(folder, models=True)
    return InputError(f"this folder is no model: {why}", file=folder)


def _why(folder: Path) -> str | None:
    """What a folder is instead; None where nothing is known of it."""
    if (folder / _ADAPTER).is_file():
        return f"it is an adapter{_base_of(folder)}; name the folder of its base model"
    if (folder / "adapter" / _ADAPTER).is_file():
        return (
            f"it is the run of an adapter{_base_of(folder / 'adapter')}; name the base model, or "
            "make one model of both with `modicum merge RUN --out FOLDER`"
        )
    if (folder / "run.json").is_file():
        return (
            "it is a run that has exported no model; let it finish: "
            f"`modicum train RECIPE --out {folder}`, as it began, resumes it"
        )
    if any(folder.glob("*.gguf")):
        return (
            "it holds a GGUF file, which cannot be trained; use the safetensors that it was made of"
        )
    # The cache of the hub keeps a model's files there.
    below = sorted(file.parent for file in folder.glob("snapshots/*/config.json"))
    below += sorted(file.parent for file in folder.glob("*/config.json"))
    if below:
        return f"it has no config.json, and {below[-1]} has one; name that folder"
    return None


def _base_of(folder: Path) -> str:
    """The base model that an adapter names, in words; nothing where it names none."""
    try:
        raw = read_json(folder / _ADAPTER)
    except InputError:
        return ""
    name = raw.get("base_model_name_or_path") if isinstance(raw, dict) else None
    return f" of {name}" if isinstance(name, str) and name else ""
