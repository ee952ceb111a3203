"""Known vulnerabilities of what is installed: `python -m tests.hardening.audit [ARGUMENTS OF PIP-AUDIT]`.

Ends with 1 where a package has one, and where pip-audit itself is used wrongly. Where its service cannot be asked, on a
machine without a network or behind a mirror that has packages alone, it says so, loudly, and ends with 0: the change
that is tested is no worse for that. Whether there is a service is found out by a package with known vulnerabilities.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_LIMIT_S = 60
_HERE = ["--local"]  # what of this environment pip-audit looks at
_VULNERABLE = "urllib3", "1.24.1"
_UNREACHABLE = re.compile(r"connect|timed? ?out|unreachable|resolve|HTTP", re.IGNORECASE)


class NotAudited(Exception):
    """The service gave no answers; says why."""


def audit(arguments: list[str]) -> int:
    """Exit status; says on stdout what was found."""
    try:
        _check_service(arguments)
        return _judged(_asked(*_HERE, *arguments))
    except NotAudited as why:
        print(f"{'!' * 78}\naudit: NOTHING WAS AUDITED: {why}\n{'!' * 78}")
        return 0


def _check_service(arguments: list[str]) -> None:
    name, version = _VULNERABLE
    with TemporaryDirectory() as folder:
        metadata = Path(folder, f"{name}-{version}.dist-info", "METADATA")
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        [package] = _asked("--path", folder, *arguments)
    if not package.get("vulns"):
        why = package.get("skip_reason", "it has nothing against it")
        raise NotAudited(f"the service does not know that {name} {version} is vulnerable ({why})")


def _asked(*arguments: str) -> list[dict]:
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


def _judged(packages: list[dict]) -> int:
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
