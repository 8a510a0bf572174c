"""What Linux says about processes, read from /proc."""

from pathlib import Path


def _fields(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the state on; None: the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # The latter where it ends while its file is read.
        return None


def runs(pid: int) -> bool:
    """Whether it is there and no zombie."""
    fields = _fields(pid)
    return fields is not None and fields[0] != "Z"


def parent(pid: int) -> int:
    """Its parent's id. Raises AssertionError if it is gone."""
    fields = _fields(pid)
    assert fields is not None, f"process {pid} is gone"
    return int(fields[1])


def children(pid: int) -> list[int]:
    """Ids of the processes that it started and that are not waited for yet."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
