"""Looks up known vulnerabilities of all that requirements.lock and constraints.txt pin, with pip-audit.

python -m tests.audit [--strict]        or `make audit`

Two advisory services are asked: that of pypi.org and, for what it does not know, that of osv.dev. A mirror of pypi.org may have no
advisories. pip-audit then skips every package and says "No known vulnerabilities found". Here that counts as not looked up, and is said in
capital letters.

Exit code: 0 none is known, or nobody could be asked; 1 some are known; 2 with --strict, where not all could be looked up.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK, CONSTRAINTS = ROOT / "requirements.lock", ROOT / "constraints.txt"
ACCEPTED: Mapping[str, str] = {}
"""Number of an advisory, or another name that it has → why it does no harm here."""
SERVICES = ("pypi", "osv")
LIMIT = 600.0
"""Seconds that a service may take for all packages."""
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", re.MULTILINE)


def pins() -> dict[str, str]:
    """Package → version, of all that is pinned."""
    pairs = [pair for path in (CONSTRAINTS, LOCK) for pair in _PIN.findall(path.read_text(encoding="utf-8"))]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def ask(wanted: Mapping[str, str], service: str, program: list[str]) -> tuple[dict[str, list[str]], str]:
    """What a service knows of some packages.

    Args:
        wanted: package → version.
        service: "pypi" or "osv".
        program: starts pip-audit.

    Returns:
        Package → its vulnerabilities, for those that the service knows; and why others were not looked up.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pins.txt")
        path.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()))
        words = ["-r", str(path), "--no-deps", "--disable-pip", "-s", service, "--format", "json", "--progress-spinner", "off"]
        try:
            done = subprocess.run([*program, *words], capture_output=True, text=True, check=False, timeout=LIMIT)
            packages = json.loads(done.stdout)["dependencies"]
        except (ValueError, LookupError, OSError, subprocess.TimeoutExpired) as error:
            lines = done.stderr.strip().splitlines() if isinstance(error, ValueError | LookupError) else []
            return {}, lines[-1][:300] if lines else f"{type(error).__name__}: {error}"
    known, skipped = dict[str, list[str]](), ""
    for package in packages:
        if "skip_reason" in package:
            skipped = skipped or package["skip_reason"]
            continue
        known[package["name"]] = [
            f"{package['name']} {package['version']}: {advisory['id']}, fixed in {', '.join(advisory['fix_versions']) or 'no version yet'}"
            for advisory in package["vulns"]
            if not {advisory["id"], *advisory.get("aliases", ())} & ACCEPTED.keys()
        ]
    return known, skipped


def main(words: list[str] | None = None, program: list[str] | None = None) -> int:
    """Ask, print, and return the exit code."""
    strict = "--strict" in (sys.argv[1:] if words is None else words)
    left, why = pins(), list[str]()
    count, vulnerable = len(left), list[str]()
    for service in SERVICES:
        if left:
            known, skipped = ask(left, service, program or [sys.executable, "-m", "pip_audit"])
            vulnerable += [line for name in known for line in known[name]]
            left = {name: version for name, version in left.items() if name not in known}
            why += [f"{service}: {skipped}"] if skipped else []
    for line in vulnerable:
        print(f"VULNERABLE: {line}")
    if left:
        names = "NONE" if len(left) == count else f"NOT {', '.join(left)}"
        print(f"NOT AUDITED: of {count} pinned packages {names} could be looked up for known vulnerabilities:", *why, sep="\n  ")
    print(f"{count - len(left)} of {count} pinned packages were looked up; {len(vulnerable)} vulnerabilities are known")
    return 1 if vulnerable else 2 if left and strict else 0


if __name__ == "__main__":
    sys.exit(main())
