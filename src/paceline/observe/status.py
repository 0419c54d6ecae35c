# ruff: noqa: F403
"""Stand-in until all imports name `record.status` (tools/move_observe_imports.py)."""

from paceline.observe.record.status import *
