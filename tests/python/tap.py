"""A tap on the wire between one client and the server: it knows when the server has dealt with a request.

A test that wants to see a blocked client woken must first be sure that the server has parked it. The tap
forwards both directions, sees the client's request go by, and then slips a PING of its own behind it. The
server serves other requests of a connection while a WAIT is pending, and in order: the PING's answer proves
that the WAIT has been registered, and whatever came before that answer was caused by something earlier. So no
test has to sleep.
"""

import socket
import struct
import threading
from contextlib import suppress

from servers import Address

PATIENCE = 30.0  # seconds; reached only when a test fails

PING = 0x0D
NONCE = b"\xa5tap"


def text(data: str | bytes) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def wait_request(*keys: str) -> bytes:
    """WAIT as torch's client sends it, for keys as its user writes them."""
    return b"\x06" + struct.pack("<Q", len(keys)) + b"".join(text("/" + key) for key in keys)


def barrier_request(key: str, world_size: int) -> bytes:
    return b"\x12" + text("/" + key) + struct.pack("<q", world_size)


class Tap:
    def __init__(self, server: Address) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname())
        self._upstream = socket.create_connection((server.host, server.port))
        self._upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client: socket.socket | None = None
        self._changed = threading.Condition()
        self._sent = bytearray()
        self._replies = bytearray()
        self._ping_pending = False
        threading.Thread(target=self._forward_requests, name="tap requests", daemon=True).start()

    def until_served(self, request: bytes) -> None:
        """Returns once the client has sent `request` last and the server has dealt with it."""
        with self._changed:
            sent = self._changed.wait_for(lambda: self._sent.endswith(request), PATIENCE)
            assert sent, f"the client sent {bytes(self._sent)!r}, not {request!r}"
        self.replies()

    def replies(self) -> bytes:
        """All that the server has sent to the client because of anything that happened before this call."""
        with self._changed:
            self._ping_pending = True
            self._upstream.sendall(bytes([PING]) + NONCE)
            assert self._changed.wait_for(lambda: not self._ping_pending, PATIENCE), (
                "no answer to the tap's PING"
            )
            return bytes(self._replies)

    def close(self) -> None:
        for end in (self._listener, self._upstream, self._client):
            if end is not None:
                with suppress(OSError):  # the other side was faster
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _forward_requests(self) -> None:
        try:
            self._client, _ = self._listener.accept()
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._forward_replies, name="tap replies", daemon=True).start()
            while data := self._client.recv(65536):
                with self._changed:
                    self._upstream.sendall(data)
                    self._sent += data
                    self._changed.notify_all()
            self._upstream.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # closed by the test or by either end: the test notices

    def _forward_replies(self) -> None:
        held = b""
        try:
            while data := self._upstream.recv(65536):
                with self._changed:
                    data = held + data
                    held = b""
                    if self._ping_pending:
                        before, nonce, after = data.partition(NONCE)
                        if not nonce:
                            held = data
                            continue
                        data = before + after
                        self._ping_pending = False
                    self._replies += data
                    self._client.sendall(data)
                    self._changed.notify_all()
            self._client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
