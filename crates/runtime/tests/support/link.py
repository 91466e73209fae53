#!/usr/bin/env python3
"""A cable that delays and loses frames, between two TAP devices that it makes.

    link.py NEAR FAR OUT IN      OUT, IN: DELAY_SECONDS,LOSS_SHARE,SEED for NEAR -> FAR and FAR -> NEAR

The kernel of the machines we test on has no `tc netem`; this is the part of it that the tests need. It makes
the devices NEAR and FAR in the network namespace it is started in (they may be moved to others afterwards)
and says `ready`. To each line on its standard input it answers how many IPv4 frames came and how many of them
it lost, as `OUT_SEEN OUT_LOST IN_SEEN IN_LOST`. It ends with its standard input.

One seed loses the same frames of the same traffic. Only IPv4 is lost: a lost ARP request costs a whole
second, and what a test would then measure is the kernel's patience with ARP.
"""

import collections
import errno
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000  # frames as they are, without a header of the tun driver
FRAME_MAX = 65536
TURN = 64  # frames read from one side before the other has its turn
IPV4 = b"\x08\x00"


def make_tap(name):
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


class Direction:
    """Frames on their way from `source` to `target`, in order: all have the same delay."""

    def __init__(self, source, target, description):
        delay, loss, seed = description.split(",")
        self.source, self.target = source, target
        self.delay, self.loss = float(delay), float(loss)
        self.random = random.Random(int(seed))
        self.underway = collections.deque()
        self.seen = self.lost = 0

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
            if frame[12:14] == IPV4:
                self.seen += 1
                if self.random.random() < self.loss:
                    self.lost += 1
                    continue
            self.underway.append((time.monotonic() + self.delay, frame))

    def deliver(self, now):
        while self.underway and self.underway[0][0] <= now:
            _, frame = self.underway.popleft()
            try:
                os.write(self.target, frame)
            except OSError as error:
                # A cable that ends nowhere, or in a full queue.
                if error.errno not in (errno.EIO, errno.EAGAIN):
                    raise


def main():
    near_name, far_name, out, into = sys.argv[1:]
    near, far = make_tap(near_name), make_tap(far_name)
    out, into = Direction(near, far, out), Direction(far, near, into)
    print("ready", flush=True)
    while True:
        dues = [way.underway[0][0] for way in (out, into) if way.underway]
        wait = max(0.0, min(dues) - time.monotonic()) if dues else None
        readable, _, _ = select.select([near, far, sys.stdin.fileno()], [], [], wait)
        for way in (out, into):
            if way.source in readable:
                way.take()
            way.deliver(time.monotonic())
        if sys.stdin.fileno() in readable:
            orders = os.read(sys.stdin.fileno(), 4096)
            if not orders:
                return
            for _ in orders.splitlines():
                print(out.seen, out.lost, into.seen, into.lost, flush=True)


main()
