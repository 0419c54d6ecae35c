# ruff: noqa: F403
"""Stand-in until all imports name `analyse.facts` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.facts import *
