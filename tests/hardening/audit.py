"""Known vulnerabilities of what is installed: `python -m tests.hardening.audit [ARGUMENTS OF PIP-AUDIT]`.

The exit status is 1 if a package is vulnerable or pip-audit fails. If its service cannot be reached (no network, or a
mirror that has only packages), a notice says so and the status is 0: that does not make the tested change worse. A
package with known vulnerabilities serves to find out whether the service answers.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_LIMIT_S = 60
_HERE = ["--local"]  # the packages to look at: those of this environment
_VULNERABLE = "urllib3", "1.24.1"
_UNREACHABLE = re.compile(r"connect|timed? ?out|unreachable|resolve|HTTP", re.IGNORECASE)


class NotAudited(Exception):
    """The service gave no answer; the message says why."""


def audit(arguments: list[str]) -> int:
    """Print what was found; returns the exit status."""
    try:
        _check_service(arguments)
        return _report(_run_pip_audit(*_HERE, *arguments))
    except NotAudited as why:
        print(f"{'!' * 78}\naudit: NOTHING WAS AUDITED: {why}\n{'!' * 78}")
        return 0


def _check_service(arguments: list[str]) -> None:
    name, version = _VULNERABLE
    with TemporaryDirectory() as folder:
        pretend_to_install(folder, name, version)
        [package] = _run_pip_audit("--path", folder, *arguments)
    if not package.get("vulns"):
        why = package.get("skip_reason", "it has nothing against it")
        raise NotAudited(f"the service does not know that {name} {version} is vulnerable ({why})")


def pretend_to_install(folder: str | Path, name: str, version: str) -> None:
    metadata = Path(folder, f"{name}-{version}.dist-info", "METADATA")
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run_pip_audit(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotAudited(f"no answer in {_LIMIT_S} s") from None
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == 1 and _UNREACHABLE.search(done.stderr):
            raise NotAudited(last) from None
        sys.exit(f"audit: pip-audit failed ({done.returncode}): {last}")


def _report(packages: list[dict]) -> int:
    asked = [package for package in packages if "skip_reason" not in package]
    found = [(package, vulnerability) for package in asked for vulnerability in package["vulns"]]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"audit: {package['name']} {package['version']} has {vulnerability['id']}; fixed in: {fixed}")
    if not found:
        n_unknown = len(packages) - len(asked)
        print(f"audit: no known vulnerability in {len(asked)} packages; {n_unknown} are not known to the service")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(audit(sys.argv[1:]))
