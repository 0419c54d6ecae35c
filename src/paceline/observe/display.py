# ruff: noqa: F403
"""Stand-in until all imports name `show.display` (tools/move_observe_imports.py)."""

from paceline.observe.show.display import *
