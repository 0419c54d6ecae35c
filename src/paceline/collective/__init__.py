"""All-reduce within a group of workers.

* `group.py`          Group: workers that act as one: they meet, average gradients, share parameters.
* `group_links.py`    GroupLinks: how the members find each other.
* `entrance.py`       Entrance: authenticates those who come, each in a thread of its own.
* `group_messages.py` GroupMessages: small messages between the members, through their root.
* `reducer.py`        Reducer: how gradients and parameters reach the other members; the weighted mean.
* `shared_memory.py`  SharedMemoryReducer: members on one host, which map each other's memory.
* `ring.py`           RingReducer: members on several hosts, over gloo.
* `row_parts.py`      part_of: the samples of a row that a member reads.
"""

from paceline.collective.group import ENDS, Group
from paceline.collective.group_links import GroupLinks
from paceline.collective.reducer import ring_bytes, shared_bytes, weighted_mean
from paceline.collective.row_parts import Part, part_of

__all__ = ["ENDS", "Group", "GroupLinks", "Part", "part_of", "ring_bytes", "shared_bytes", "weighted_mean"]
