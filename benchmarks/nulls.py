"""Does each proof notice when the method is not there? Every proof's null run, one after the other.

A null is noticed if nothing is a defect: each null missed a criterion, and each part of the verdict
that stood has fallen; where none stood, what was planted was found.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import alone, say, write_result

from modicum.core.contracts.catalog import catalog
from modicum.core.errors import InputError
from modicum.proofs import prove

WITHOUT = ("tasks",)


def main() -> None:
    """Run the nulls, write which were noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full experiments; takes hours")
    full = parser.parse_args().full
    results: dict[str, dict[str, Any]] = {}
    with alone():
        for name, record in catalog().items():
            if record.room in WITHOUT:
                continue
            started = time.perf_counter()
            try:
                proof = prove(name, null=True, full=full)
            except InputError as error:
                if "has no proof yet" not in str(error):
                    raise
                continue
            results[name] = {
                "noticed": not proof.defects,
                "planted": proof.planted,
                "defects": list(proof.defects),
                "reason": proof.reason,
                "seconds": round(time.perf_counter() - started, 1),
            }
            said = "noticed" if not proof.defects else f"NOT noticed: {proof.reason}"
            say(f"{name:10} {said} ({results[name]['seconds']} s)")
    share = sum(each["noticed"] for each in results.values()) / len(results)
    write_result("nulls", {"proofs": results, "share_noticed": share}, {"full": full})


if __name__ == "__main__":
    main()
