"""For tests of Paceline and of programs that use it.

* `engine.py` KeptEngine: an engine whose fork server serves many runs, so that a run starts in a second.
"""

from paceline.testing.engine import KeptEngine

__all__ = ["KeptEngine"]
