# ruff: noqa: F403
"""Stand-in until all imports name `analyse.diagnosis` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.diagnosis import *
