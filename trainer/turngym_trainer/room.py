"""How much memory there is for a run to take: of a GPU, or of this process on the machine.

Knows nothing of what a run takes; see `memory`.
"""

from pathlib import Path
from typing import Final

import torch

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None: this system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_to_process()


def available_to_process(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The machine's available memory, or less where a control group of this process bounds it.

    Args:
        proc: where Linux shows its processes.
        cgroups: where it shows control groups, of either version.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in sizes:
        return None
    machine = int(sizes["MemAvailable"].split()[0]) * 1024
    return min([machine, *(left for folder in _groups(proc, cgroups) if (left := _left(folder)) is not None)])


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Folders of this process's control groups that may bound memory, the groups that hold them included."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = cgroups / "memory" if controllers else cgroups
            inner = root / path.strip("/")
            folders += [inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]
    return folders


def _left(folder: Path) -> int | None:
    """What a control group may still take; None: it is not bounded. File pages that can be dropped count as free."""
    for limit, usage, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text(encoding="ascii").strip()
            if most == "max":
                return None
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            used = int((folder / usage).read_text(encoding="ascii")) - int(stat.get(dropped, 0))
            return max(0, int(most) - used)
        except (OSError, ValueError):
            continue
    return None
