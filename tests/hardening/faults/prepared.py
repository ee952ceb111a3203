"""Run a script after what its `Command` prepares: prepared.py SCRIPT ARGUMENTS..."""

import os
import runpy
import sys
from pathlib import Path

from tests.hardening.faults.commands import COMMANDS

sys.argv = sys.argv[1:]
[prepare] = {command.prepare for command in COMMANDS.values() if command.main == sys.argv[0]} - {None}
prepare(Path(os.environ["LABKIT_FAULT_PLACE"]), os.environ["LABKIT_FAULT_SERVER"])
runpy.run_path(sys.argv[0], run_name="__main__")
