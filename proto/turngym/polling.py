"""How gRPC waits for sockets in this process, which has to be said before it is imported.

gRPC's event engine hands what comes in from thread to thread before Python sees it. Without it, the thread that waits
for results reads the sockets itself: 1.4 times as many steps a second for one caller at a time, 1.07 to 1.25 times for
16 to 64 (two cores; `benchmarks/throughput.py` runs either way). That is how gRPC worked until 1.70, and what its own
switches lead back to.
"""

import importlib.metadata
import os
import sys
from typing import Final

SWITCHES: Final = "GRPC_EXPERIMENTS"
FORK_SUPPORT: Final = "GRPC_ENABLE_FORK_SUPPORT"
"""gRPC reads these variables once. Who sets one of them, even to nothing, has both as they are."""
WITHOUT_EVENT_ENGINE: Final = "-event_engine_client,-event_engine_listener"
SETTINGS: Final = {
    SWITCHES: WITHOUT_EVENT_ENGINE,
    # What gRPC does at a fork, for children that go on to use it, then ends the parent (SIGSEGV) once one does.
    FORK_SUPPORT: "0",
}
KNOWN_MINORS: Final = range(71, 86)
"""Releases 1.x that know these switches; others might complain of them on stderr."""


def poll_directly() -> None:
    """Imports gRPC without its event engine, unless it is imported already, told otherwise, or unknown here.

    The environment stays as it is, for child processes too.
    """
    if not sys.platform.startswith("linux") or "grpc" in sys.modules or SETTINGS.keys() & os.environ.keys():
        return
    try:
        major, minor, *_ = importlib.metadata.version("grpcio").split(".")
    except importlib.metadata.PackageNotFoundError:  # As where an application was frozen into one file.
        return
    if major != "1" or int(minor) not in KNOWN_MINORS:
        return
    os.environ.update(SETTINGS)
    try:
        import grpc  # noqa: F401  # pyright: ignore[reportUnusedImport]
    finally:
        for name in SETTINGS:
            del os.environ[name]
