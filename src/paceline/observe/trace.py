# ruff: noqa: F403
"""Stand-in until all imports name `show.perfetto` (tools/move_observe_imports.py)."""

from paceline.observe.show.perfetto import *
from paceline.observe.show.perfetto import StepRange

Steps = StepRange
