# ruff: noqa: F403
"""Stand-in until all imports name `show.page` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.facts import mean_staleness as mean_staleness
from paceline.observe.analyse.summary import key_figures as key_figures
from paceline.observe.show.page import *
from paceline.observe.show.page_charts import histogram as histogram
