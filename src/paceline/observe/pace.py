# ruff: noqa: F403
"""Stand-in until all imports name `record.pace` (tools/move_observe_imports.py)."""

from paceline.observe.record.pace import *
from paceline.observe.record.pace import TrainingPace

Pace = TrainingPace
