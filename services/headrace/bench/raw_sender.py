"""The other process of the raw loopback measurement: sends bytes as fast as a plain TCP socket takes them.

Run as `python -m headrace.bench.raw_sender SEED NUM_BYTES`. Prints the port that it listens on, serves one connection,
and ends with it. A request is eight bytes: how many bytes to send, always from the start of the data.
"""

import socket
import struct
import sys

import numpy as np

REQUEST = struct.Struct("<II")  # bytes to send in all, bytes given to the kernel at once


def make_bytes(seed: int, num_bytes: int) -> bytes:
    """The data: random, so that nothing on the way can make it smaller, and the same in every process."""
    return np.random.default_rng(seed).bytes(num_bytes)


def main() -> None:
    """Serve one connection until it is closed."""
    seed, num_bytes = int(sys.argv[1]), int(sys.argv[2])
    data = memoryview(make_bytes(seed, num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(request := connection.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
            wanted, piece = REQUEST.unpack(request)
            for start in range(0, wanted, piece):
                connection.sendall(data[start : min(start + piece, wanted)])


if __name__ == "__main__":
    main()
