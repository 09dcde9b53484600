"""Runs a command in a network namespace that has nothing but `lo`, or as it is where the system doesn't allow that.

`python -m tests.backends.alone COMMAND...`: Mooncake listens on every interface, so its tests run nowhere else.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
IFF_UP = 1
INSIDE = "--inside"  # first argument of the second start, in the namespace


def main(arguments: list[str]) -> None:
    """Become the command."""
    if arguments[:1] == [INSIDE]:
        loopback_up()
        arguments = arguments[1:]
    elif can_unshare():
        arguments = ["unshare", "-rn", sys.executable, "-m", "tests.backends.alone", INSIDE, *arguments]
    else:
        print("alone: no network namespace here; tests that need one are skipped", file=sys.stderr)
    os.execvp(arguments[0], arguments)


def can_unshare() -> bool:
    """True where a namespace may be made."""
    return (
        shutil.which("unshare") is not None and not subprocess.run(["unshare", "-rn", "true"], check=False).returncode
    )


def loopback_up() -> None:
    """A new namespace's `lo` is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


if __name__ == "__main__":
    main(sys.argv[1:])
