"""How roles talk: one protocol, carried by unix sockets (same host) or TCP.

* `frames.py`     the wire format: a bounded, authenticated header, a JSON body, a payload. Pure.
* `messages.py`   the messages between the controller and the roles: one class and one kind for each.
* `worker_messages.py` the messages between workers and servers, likewise.
* `server_messages.py` the messages between servers, likewise.
* `message_codec.py` reads and writes the bodies of such messages, and validates them.
* `handshake.py`  both sides prove that they know the run's secret, and agree on a key.
* `pinned_tls.py` TLS with a side of which only the certificate's fingerprint is known: how hosts join.
* `store_link.py` RemoteStore, StoreService: the store of the controller's host, used from another one.
* `tls.py`        TLS under a TCP link, and which role's certificate the other side must have.
* `certificates.py` makes and reads a run's certificates.
* `incoming.py`   Incoming: a frame that is read as it comes.
* `connection.py` Connection: frames over one authenticated socket.
* `errors.py`     what an ERROR frame says of an exception, and the exception that one stands for.
* `aside.py`      sending without waiting for the other side to read.
* `stream_schemes.py` Address; unix, TCP and TLS streams, by scheme.
* `meeting.py`    how roles get a Connection: Listener, accept(), connect().
* `lasting.py`    LastingLink: a role's link to the controller, which may die and be replaced.
* `clocks.py`     one clock for all roles, on whichever host.
* `newcomers.py`  Newcomers: connections that are authenticating, and which must go.
* `hub.py`        Hub: one thread that serves many connections.
* `fence.py`      Fence: a moment in the work of a device, which another process can wait for.
* `device.py`     SharedDevice: memory of a device that processes share, and flags that keep their order.
* `cuda_device.py` CudaDevice: that of an NVIDIA GPU.
* `device_time.py` marks in the order of a device's work, which tell when it came to them.
* `memory.py`     Region: shared memory without a name, handed over as a file descriptor.
* `compression/`  what a gradient weighs on a link: ways to write a slice.
* `transfer.py`   Transfer: how payloads travel (compressed, overlapped, prefetched), and in which modes.
* `faults.py`     faults on purpose, in a role, at a step: what roles ask for; for tests.
* `loading.py`    loads what is named `module:function`.
* `protection.py`  checks left out on purpose; for the benchmark of what they cost.
* `impairment.py` conditions of a link that is made worse on purpose, for tests and benchmarks.

Nothing on a socket is ever unpickled, and nothing is allocated for a length that was not checked.
"""

from paceline.comm.connection import Connection, Frame
from paceline.comm.frames import Kind
from paceline.comm.handshake import new_secret
from paceline.comm.hub import Hub
from paceline.comm.meeting import Address, Listener, connect
from paceline.comm.memory import Access, Region
from paceline.comm.tls import Certificate, Secret

__all__ = [
    "Access",
    "Address",
    "Certificate",
    "Connection",
    "Frame",
    "Hub",
    "Kind",
    "Listener",
    "Region",
    "Secret",
    "connect",
    "new_secret",
]
