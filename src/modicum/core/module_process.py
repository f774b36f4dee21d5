"""How Python is run in a process of its own, with what this process has found.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# What this process finds, and nothing of the current folder before it: `-m` would look there first,
# where a file may have the name of a module of the standard library.
_PATHS = (
    "import json, sys; paths, given = json.loads(sys.argv[1]); "
    "sys.path += [path for path in paths if path not in sys.path]; "
)
# As `python -m` runs a module: its name is given, and the words after it.
RUN_MODULE = (
    "import runpy; sys.argv[1:] = given[1:]; "
    "runpy.run_module(given[0], run_name='__main__', alter_sys=True)"
)


def python_command(program: str, given: Any) -> list[str]:
    """The command that runs statements, for which `given`, of JSON, `json` and `sys` are there.

    >>> import subprocess
    >>> subprocess.run(python_command("sys.exit(given)", 3)).returncode
    3
    """
    return [sys.executable, "-P", "-c", _PATHS + program, json.dumps([sys.path, given])]


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs a module as `python -m` does, with these arguments.

    >>> import subprocess
    >>> subprocess.run(module_command("platform"), capture_output=True, check=True).returncode
    0
    """
    return python_command(RUN_MODULE, [module, *words])
