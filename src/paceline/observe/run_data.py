# ruff: noqa: F403
"""Stand-in until all imports name `analyse.run_data` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.run_data import *
