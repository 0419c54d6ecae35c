# ruff: noqa: F403
"""Stand-in until all imports name `analyse.comparison` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.comparison import *
from paceline.observe.show.comparison_page import comparison_page as comparison_page
from paceline.observe.show.comparison_page import write_comparison as write_comparison
