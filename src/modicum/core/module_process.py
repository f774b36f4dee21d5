"""How a module is run in a process of its own, wherever this process has found it.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import sys

# What this process finds, and nothing of the current folder before it: `-m` would look there first,
# where a file may have the name of a module of the standard library.
_PROGRAM = (
    "import json, runpy, sys; module, paths = sys.argv[1], json.loads(sys.argv[2]); "
    "sys.path += [path for path in paths if path not in sys.path]; "
    "sys.argv[1:] = sys.argv[3:]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs a module as `python -m` does, with these arguments.

    >>> import subprocess
    >>> subprocess.run(module_command("platform"), capture_output=True, check=True).returncode
    0
    """
    return [sys.executable, "-P", "-c", _PROGRAM, module, json.dumps(sys.path), *words]
