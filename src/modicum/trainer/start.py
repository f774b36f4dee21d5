"""A copy, in the run folder, of the adapter that training starts from.

A run that resumes does not need the folder any more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from modicum.core.files import publish_folder
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan


def adapter_start(plan: Plan, folder: Path, ranks: Ranks) -> Path | None:
    """The folder that the recipe's adapter starts from; None where it begins anew.

    Args:
        folder: where the copy is, or is put by the first rank.
    """
    source = plan.recipe.model.adapter
    if source is None:
        return None
    if ranks.first and not folder.is_dir():
        with publish_folder(folder) as temporary:
            for file in Path(source).iterdir():
                if file.suffix in (".json", ".safetensors"):
                    shutil.copyfile(file, temporary / file.name)
    ranks.sum(0)  # nobody reads before it is there
    return folder
