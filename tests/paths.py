"""Where tests find the repository."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = REPO / "data_scripts"
