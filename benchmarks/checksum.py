"""What a checksum of payloads would cost on a TCP link without TLS (docs/decisions.md).

The cheapest sum there is in Python: 64-bit words added up by numpy, piece by piece, while each is in the
processor's cache. CPU time of the sending and of the receiving thread, with and without it, in turns::

    python -m benchmarks.checksum
"""

import socket
import statistics
import threading
import time
import zlib

import numpy as np

NBYTES = 47 << 20
PIECE = 256 << 10
ROUNDS = 15


class Link:
    """Two ends of a loopback TCP link, and what travels over it."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.near = socket.create_connection(listening.getsockname())
            self.far, _ = listening.accept()
        for sock in (self.near, self.far):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.words = np.random.default_rng(0).integers(0, 1 << 62, NBYTES // 8, dtype=np.uint64)
        self.room = np.empty_like(self.words)

    def send(self, *, summing: bool) -> None:
        """All of it, in pieces."""
        view = self.words.data.cast("B")
        for start in range(0, NBYTES, PIECE):
            if summing:
                np.add.reduce(self.words[start // 8 : (start + PIECE) // 8])
            self.near.sendall(view[start : start + PIECE])

    def receive(self, *, summing: bool) -> None:
        """All of it, in pieces."""
        view = self.room.data.cast("B")
        for start in range(0, NBYTES, PIECE):
            self.far.recv_into(view[start : start + PIECE], 0, socket.MSG_WAITALL)
            if summing:
                np.add.reduce(self.room[start // 8 : (start + PIECE) // 8])

    def transfer(self, *, summing: bool) -> tuple[float, float]:
        """CPU milliseconds of sending and of receiving."""
        spent = []

        def sending() -> None:
            began = time.thread_time()
            self.send(summing=summing)
            spent.append(time.thread_time() - began)

        thread = threading.Thread(target=sending)
        thread.start()
        began = time.thread_time()
        self.receive(summing=summing)
        received = time.thread_time() - began
        thread.join()
        return spent[0] * 1e3, received * 1e3


def main() -> None:
    """Print the medians."""
    link = Link()
    runs = [(link.transfer(summing=False), link.transfer(summing=True)) for _ in range(ROUNDS)]
    for at, name in enumerate(("sending", "receiving")):
        plain = statistics.median(each[0][at] for each in runs)
        summed = statistics.median(each[1][at] for each in runs)
        print(f"{name} {NBYTES >> 20} MiB: {plain:.1f} ms of CPU, {summed:.1f} with a sum of 64-bit words")
    data = link.words.tobytes()
    for name, checksum in (("crc32", zlib.crc32), ("adler32", zlib.adler32)):
        began = time.thread_time()
        checksum(data)
        print(f"{name} of {NBYTES >> 20} MiB: {(time.thread_time() - began) * 1e3:.1f} ms of CPU")
    link.near.close()
    link.far.close()


if __name__ == "__main__":
    main()
