"""Files that hold secrets: read only where nobody else can read or change them."""

import os
import stat
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 16 * 1024 * 1024
"""Longest file that is read: as many as the tokens of a large site take, and read in no time."""


def read_private(path: Path) -> str:
    """The text of a file that others may not read, and that only its owner may write.

    A group may read it, since that is how a cluster hands secrets to a service.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, others may read or change it, it is too long, or it is no UTF-8 text. Says
            what to do.
    """
    # Neither waits for a FIFO's writer nor takes a terminal as the process's own.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is no regular file; expected one, not a FIFO, a device or a folder")
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"{path} has mode {stat.S_IMODE(mode):03o}: others may read or change it; "
                f"expected 600 (chmod 600 {path})"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is longer than {MAX_BYTES} bytes; expected a small text file")
    try:
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        # Without its input, which is the file.
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only its owner may read. Raises FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
