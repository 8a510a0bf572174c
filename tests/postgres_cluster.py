"""A PostgreSQL cluster of its own, on a free port of the loopback interface, for as long as tests need one."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg

WHERE = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
"""Where Debian puts the programs, which are not on its PATH."""

_AS_NOBODY = """
import os, pwd, sys
nobody = pwd.getpwnam("nobody")
os.setgroups([])
os.setgid(nobody.pw_gid)
os.setuid(nobody.pw_uid)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs its arguments as a user that may nothing."""


def missing() -> str:
    """Why there can be no cluster here; "": there can."""
    if _program("initdb") is None or _program("postgres") is None:
        return "no PostgreSQL here: initdb and postgres are neither on PATH nor in /usr/lib/postgresql"
    return ""


@contextmanager
def cluster() -> Generator[str]:
    """Runs a cluster; gives the URL of its database."""
    # The server refuses to run as root. `user=` of Popen would fork this process, which gRPC's threads do not survive.
    user, become = ("nobody", [sys.executable, "-c", _AS_NOBODY]) if os.geteuid() == 0 else (None, [])
    with tempfile.TemporaryDirectory(prefix="turngym-postgres-") as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        # Asks for no password, and listens on the loopback interface alone.
        setup = [
            *become,
            _program("initdb"),
            "-D",
            data,
            "-U",
            "turngym",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
        ]
        subprocess.run(setup, check=True, capture_output=True, cwd=folder)
        port = free_port()
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(
                [*become, _program("postgres"), "-D", data, *options], stdout=log, stderr=log, cwd=folder
            )
        try:
            url = f"postgresql://turngym@127.0.0.1:{port}/postgres"
            _wait(url, server, Path(folder) / "log")
            yield url
        finally:
            server.send_signal(2)  # Ends all connections too.
            server.wait(30)


def empty(url: str) -> None:
    """Drops all that is in a database."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


def _program(name: str) -> str | None:
    return shutil.which(name) or next((str(folder / name) for folder in WHERE if (folder / name).is_file()), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ready = _program("pg_isready")
    for _ in range(300):
        if server.poll() is not None:
            break
        if subprocess.run([ready, "-q", "-d", url, "-t", "1"]).returncode == 0:
            return
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"PostgreSQL did not start: {log.read_text()}")
