"""The rate of a matrix product, timed once for commands that follow each other.

A tenth of a second says it to a fifth on a machine that does nothing else, and to a factor of two
on a busy one. `modicum init`, `plan` and `train` of one recipe are to forecast one time, so they
share the rate that the first of them timed.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace

import torch

from modicum.core.errors import InputError
from modicum.core.files import regular, write_json
from modicum.core.machine import Machine, this_machine
from modicum.core.machine.identity import record_file

SHARED_SECONDS = 600


def shared_machine(device: torch.device) -> Machine:
    """This machine, with the rate that was timed last where that is less than ten minutes ago.

    For a process that plans alone; ranks that run at once each time their own.

    >>> cpu = torch.device("cpu")
    >>> shared_machine(cpu).flops == shared_machine(cpu).flops
    True
    """
    file = record_file(device.type).with_suffix(".rate.json")
    machine = this_machine(device)
    now = time.time()
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        known = json.loads(regular(file).read_bytes())
        rate, when = float(known["flops"]), float(known["when"])
        if 0 <= now - when < SHARED_SECONDS and 0 < rate < float("inf"):
            return replace(machine, flops=rate)
    with suppress(OSError, InputError):  # timed again next time, then
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"flops": machine.flops, "when": now})
    return machine
