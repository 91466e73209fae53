"""Links with a delay, for the hosts of `tenfold bench --hosts`.

usage: python -c PROGRAM DELAY_SECONDS END PORT [END PORT]…

Makes the TAP devices END and PORT in the network namespace that it is started in, prints `ready`, and passes
every frame from one to the other after the delay, in both directions. The devices may be moved to other
namespaces afterwards. It ends with its standard input, and the devices end with it.

Frames are passed as the kernel has them: up to 64 KiB, with the header that says how a network card would
cut them up. So the cost for each byte is small.
"""

import collections
import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
# Checksums and segments of TCP over IPv4 and IPv6 are left to the device.
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
FRAME_MAX = 65536 + 64
TURN = 64  # frames of one device before the next has its turn
PR_SET_TIMERSLACK = 29


def make_tap(name):
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return tap


class Direction:
    """Frames from `source` to `target`, in order: all have the same delay."""

    def __init__(self, source, target, delay):
        self.source, self.target, self.delay = source, target, delay
        self.underway = collections.deque()

    def take(self):
        for _ in range(TURN):
            try:
                frame = os.read(self.source, FRAME_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:  # the device is not up yet, or no longer
                    return
                raise
            self.underway.append((time.monotonic() + self.delay, frame))

    def deliver(self, now):
        while self.underway and self.underway[0][0] <= now:
            _, frame = self.underway.popleft()
            try:
                os.write(self.target, frame)
            except OSError as error:
                # The other end is down, or its queue is full.
                if error.errno not in (errno.EIO, errno.EAGAIN):
                    raise


def main():
    # The kernel may otherwise wake us 50 microseconds late.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    delay, names = float(sys.argv[1]), sys.argv[2:]
    taps = [make_tap(name) for name in names]
    ways = []
    for end, port in zip(taps[::2], taps[1::2], strict=True):
        ways += [Direction(end, port, delay), Direction(port, end, delay)]
    print("ready", flush=True)
    events = select.epoll()
    for tap in taps:
        events.register(tap, select.EPOLLIN)
    events.register(0, select.EPOLLIN)
    by_source = {way.source: way for way in ways}
    # epoll counts in milliseconds, select in microseconds.
    watched = [events.fileno()]
    while True:
        dues = [way.underway[0][0] for way in ways if way.underway]
        select.select(watched, [], [], max(0.0, min(dues) - time.monotonic()) if dues else None)
        for ready, _ in events.poll(0):
            if ready == 0:
                return
            by_source[ready].take()
        now = time.monotonic()
        for way in ways:
            way.deliver(now)


main()
