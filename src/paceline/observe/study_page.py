# ruff: noqa: F403
"""Stand-in until all imports name `show.study_page` (tools/move_observe_imports.py)."""

from paceline.observe.show.study_page import *
