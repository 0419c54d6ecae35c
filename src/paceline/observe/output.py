# ruff: noqa: F403
"""Stand-in until all imports name `record.output` (tools/move_observe_imports.py)."""

from paceline.observe.record.output import *
from paceline.observe.record.output import OutputPiece

Piece = OutputPiece
