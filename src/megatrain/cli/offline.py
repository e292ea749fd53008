"""`--offline`: no network, whatever a library tries. Imported before any library that could ask for one."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

# What libraries call it. Trackers then write into the run folder or to this machine.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
}
OUTWARD = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")


def go_offline() -> None:
    """From now on, to the end of the process: libraries and child processes are told, and sockets go nowhere else."""
    os.environ.update(VARIABLES)
    sys.addaudithook(_refuse_network)


def _refuse_network(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: OSError where this process would reach another machine, or ask for its address."""
    if event not in OUTWARD:
        return
    host: object = arguments[0]
    if isinstance(host, socket.SocketType):
        if host.family not in (socket.AF_INET, socket.AF_INET6):
            return
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else address
    if not _is_this_machine(host):
        raise OSError(f"--offline: {event} to {host!r} was refused")


def _is_this_machine(host: object) -> bool:
    """Whether a host, as sockets take it, is this machine itself: None, "", "localhost" and loopback addresses."""
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if text in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(text)).is_loopback
    except ValueError:
        return False
