"""For tests of Paceline and of programs that use it.

* `engine.py` KeptEngine: an engine whose fork server serves many runs, so that a run starts in a second.
* `paper_engine.py` PaperEngine: an engine that starts nothing, for tests of what follows from exits.
* `environment.py` a variable of the environment, for a while.
* `injected_faults.py` faulty, random_faults: roles that die, stop, slow down or send nonsense, at a step.
* `hostile_peer.py` HostilePeer, ATTACKS: a peer that holds the secret and breaks the protocol.
* `host_device.py` HostDevice: takes a GPU's place, on the CPU.
* `impaired_links.py` LinkConditions, impaired, slow_links: links with latency and a limited rate.
* `simulated.py` SimulatedRun: a whole run in one process and in virtual time.
"""

from paceline.testing.engine import KeptEngine
from paceline.testing.hostile_peer import ATTACKS, HostilePeer
from paceline.testing.impaired_links import LinkConditions, impaired, slow_links
from paceline.testing.injected_faults import Fault, faulty, random_faults
from paceline.testing.injected_faults import InjectedFaults as Faults
from paceline.testing.paper_engine import PaperEngine
from paceline.testing.simulated import SimulatedRun

__all__ = [
    "ATTACKS",
    "Fault",
    "Faults",
    "HostilePeer",
    "KeptEngine",
    "LinkConditions",
    "PaperEngine",
    "SimulatedRun",
    "faulty",
    "impaired",
    "random_faults",
    "slow_links",
]
