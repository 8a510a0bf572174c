"""Files that hold secrets: read only where nobody else can read or change them."""

import os
import stat
from pathlib import Path


def read_private(path: Path) -> str:
    """The text of a file that others may not read, and that only its owner may write.

    A group may read it, since that is how a cluster hands secrets to a service.

    Raises:
        OSError: it cannot be read.
        ValueError: others may read or change it, or it is no UTF-8 text. Says what to do.
    """
    with path.open(encoding="utf-8") as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"{path} has mode {stat.S_IMODE(mode):03o}: others may read or change it; "
                f"expected 600 (chmod 600 {path})"
            )
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def write_private(path: Path, text: str) -> None:
    """Writes a new file that only its owner may read. Raises FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
