# ruff: noqa: F403
"""Stand-in until all imports name `analyse.watch` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.watch import *
