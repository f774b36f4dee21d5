"""Whether a user's own data and runs are what they should be: checks that pass or say what is off.

>>> from modicum.verify import verify_export
>>> verify_export("runs/mine").passed                                    # doctest: +SKIP
True
"""

from __future__ import annotations

from modicum.verify.data import DataLimits, verify_data
from modicum.verify.export import verify_export
from modicum.verify.findings import Verification, Wanting
from modicum.verify.reproduction import reproduce
from modicum.verify.resume import verify_resume

__all__ = [
    "DataLimits",
    "Verification",
    "Wanting",
    "reproduce",
    "verify_data",
    "verify_export",
    "verify_resume",
]
