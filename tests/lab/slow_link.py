"""A cable with delay, loss and a rate: moves packets between two network cards that it makes, in two namespaces.

    python slow_link.py PID NAME PID NAME DELAY_MS LOSS MBIT_PER_SECOND

PID is a process in the namespace. The kernel's own `netem` does the same, but few small kernels have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

CLONE_NEWNET, TUNSETIFF, IFF_TAP_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1002


def card(pid: str, name: str) -> int:
    """Make a network card in the namespace of a process; returns a descriptor that reads and writes its packets."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_WITHOUT_HEADER))
    return tap


def carry(ends: list[int], delay: float, loss: float, bytes_per_second: float) -> None:
    """Carry packets for ever. ``delay`` in seconds."""
    chance = random.Random(0)
    under_way: list[tuple[float, int, int, bytes]] = []
    free_at, number = [0.0, 0.0], 0
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        readable, _, _ = select.select(ends, [], [], wait)
        now = time.monotonic()
        for end in readable:
            packet, to = os.read(end, 65536), 1 - ends.index(end)
            if chance.random() >= loss:
                free_at[to] = max(free_at[to], now) + len(packet) / bytes_per_second
                heapq.heappush(under_way, (free_at[to] + delay, number, to, packet))
                number += 1
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # that card is down, so the packet is lost
                os.write(ends[to], packet)


if __name__ == "__main__":
    cards = [card(*sys.argv[1:3]), card(*sys.argv[3:5])]
    print("ready", flush=True)
    carry(cards, float(sys.argv[5]) / 1000, float(sys.argv[6]), float(sys.argv[7]) * 125000)
