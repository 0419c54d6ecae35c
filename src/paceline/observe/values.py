# ruff: noqa: F403
"""Stand-in until all imports name `record.values` (tools/move_observe_imports.py)."""

from paceline.observe.record.values import *
