# ruff: noqa: F403
"""Stand-in until all imports name `analyse.study_data` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.study_data import *
