"""For tests of Paceline and of programs that use it.

* `engine.py` KeptEngine: an engine whose fork server serves many runs, so that a run starts in a second.
* `environment.py` a variable of the environment, for a while.
* `faults.py` faulty, random_faults: roles that die, stop, slow down or send nonsense, at a step, by a seed.
* `links.py`  LinkConditions, impaired, slow_links: links with latency and a limited rate.
* `simulated.py` SimulatedRun: a whole run in one process and in virtual time.
"""

from paceline.testing.engine import KeptEngine
from paceline.testing.faults import Fault, Faults, faulty, random_faults
from paceline.testing.links import LinkConditions, impaired, slow_links
from paceline.testing.simulated import SimulatedRun

__all__ = [
    "Fault",
    "Faults",
    "KeptEngine",
    "LinkConditions",
    "SimulatedRun",
    "faulty",
    "impaired",
    "random_faults",
    "slow_links",
]
