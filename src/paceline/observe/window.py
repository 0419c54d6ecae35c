# ruff: noqa: F403
"""Stand-in until all imports name `analyse.window` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.window import *
