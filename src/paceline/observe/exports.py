# ruff: noqa: F403
"""Stand-in until all imports name `show.exports` (tools/move_observe_imports.py)."""

from paceline.observe.show.exports import *
