"""The report's page in Chromium: which checks of tests/browser pass."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from common import say, write_result

CHECKS = Path(__file__).resolve().parents[1] / "tests" / "browser"


def main() -> None:
    """Run the checks and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", f"--junitxml={report}", str(CHECKS)]
        subprocess.run(command, stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    if not cases:
        sys.exit("no check ran")
    passed = [case.get("name") for case in cases if len(case) == 0]
    others = [case.get("name") for case in cases if len(case) > 0]
    say(f"{len(passed)} passed, {len(others)} did not")
    figures = {"passed": len(passed), "not_passed": len(others), "checks": [*passed, *others]}
    write_result("browser", figures, {})


if __name__ == "__main__":
    main()
