"""How payloads move on a link between a worker and a server: the server's end.

* `carrier.py`         Carrier: the interface; Attaching: what one is made from.
* `registry.py`        CARRIERS: all kinds by their names; make_carrier.
* `shared_carrier.py`  SharedCarrier: memory that a worker on this host shares.
* `mirrored_carrier.py` MirroredCarrier: the same, for a worker whose device copies slices by itself.
* `device_carrier.py`  DeviceCarrier: memory of a device that the worker and the server are on.
* `inline_carrier.py`  InlineCarrier: over the link's own socket.
* `link_thread.py`     LinkThread: the thread that reads and writes that socket.
* `incoming_pushes.py` IncomingPushes: reads the payloads of pushes from it.

The worker's end of each is in `worker/exchange/`. CONTRIBUTING.md says how to add one.
"""

from paceline.ps.carriers.carrier import Attaching, Carrier
from paceline.ps.carriers.registry import CARRIERS, make_carrier

__all__ = ["CARRIERS", "Attaching", "Carrier", "make_carrier"]
