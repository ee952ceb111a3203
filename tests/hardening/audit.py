"""Known vulnerabilities of what is installed: `python -m tests.hardening.audit [ARGUMENTS OF PIP-AUDIT]`.

The exit status is 1 if a package is vulnerable or pip-audit fails. If its service cannot be reached (no network, or a
mirror that has only packages), a notice says so and the status is 0: that does not make the tested change worse. A
package with known vulnerabilities serves to find out whether the service answers.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

LIMIT_S = 60
THIS_ENVIRONMENT = ("--local",)
VULNERABLE = "urllib3", "1.24.1"
UNREACHABLE = re.compile(r"connect|timed? ?out|unreachable|resolve|HTTP", re.IGNORECASE)


class NotAudited(Exception):
    """The service gave no answer; the message says why."""


def audit(arguments: list[str], packages: Sequence[str] = THIS_ENVIRONMENT) -> int:
    """Print what was found, of the packages that an option of pip-audit names; returns the exit status."""
    name, version = VULNERABLE
    try:
        with TemporaryDirectory() as folder:
            pretend_to_install(folder, name, version)
            [known] = run_pip_audit("--path", folder, *arguments)
        if not known.get("vulns"):
            why = known.get("skip_reason", "it has nothing against it")
            raise NotAudited(f"the service does not know that {name} {version} is vulnerable ({why})")
        found = run_pip_audit(*packages, *arguments)
    except NotAudited as why:
        print(f"{'!' * 78}\naudit: NOTHING WAS AUDITED: {why}\n{'!' * 78}")
        return 0
    asked = [package for package in found if "skip_reason" not in package]
    flaws = [(package, flaw) for package in asked for flaw in package["vulns"]]
    for package, flaw in flaws:
        fixed = ", ".join(flaw["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']} has {flaw['id']}; fixed in: {fixed}")
    if not flaws:
        n_unknown = len(found) - len(asked)
        print(f"audit: no known vulnerability in {len(asked)} packages; {n_unknown} are not known to the service")
    return int(bool(flaws))


def pretend_to_install(folder: str | Path, name: str, version: str) -> None:
    metadata = Path(folder, f"{name}-{version}.dist-info", "METADATA")
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run_pip_audit(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotAudited(f"no answer in {LIMIT_S} s") from None
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == 1 and UNREACHABLE.search(done.stderr):
            raise NotAudited(last) from None
        sys.exit(f"audit: pip-audit failed ({done.returncode}): {last}")


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1:]))
