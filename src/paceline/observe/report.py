# ruff: noqa: F403
"""Stand-in until all imports name `show.run_report` (tools/move_observe_imports.py)."""

from paceline.observe.analyse.summary import diagnosis_of as diagnosis_of
from paceline.observe.analyse.summary import known_facts as known_facts
from paceline.observe.analyse.summary import summary_of as summary_of
from paceline.observe.show.run_report import *
