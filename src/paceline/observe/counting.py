# ruff: noqa: F403
"""Stand-in until all imports name `record.counting` (tools/move_observe_imports.py)."""

from paceline.observe.record.counting import *
