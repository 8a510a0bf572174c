"""`leaderboard view`: opens files and serves their viewer on the loopback. Knows nothing of pages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from turngym_leaderboard.pages.loopback import CannotListen, serve_on_loopback
from turngym_leaderboard.pages.trajectory_file import CannotView, TrajectoryFile
from turngym_leaderboard.pages.viewer import viewer

__all__ = ["CannotListen", "CannotView", "open_files", "serve_files"]

KEYS: Final = ("a", "b")
"""Address the files; two at most, since two episodes stand side by side."""


def open_files(paths: Sequence[Path], progress: Callable[[str, int, int], None]) -> list[TrajectoryFile]:
    """Reads files from end to end.

    Args:
        progress: called with a file's title, bytes read and bytes in all.

    Raises:
        CannotView: one cannot be read, or there are more than two.
    """
    if len(paths) > len(KEYS):
        raise CannotView(f"{len(paths)} files were named; expected one or two")
    files = [TrajectoryFile(path, key) for path, key in zip(paths, KEYS, strict=False)]
    for file in files:
        file.refresh(lambda done, total, title=file.title: progress(title, done, total))
    return files


def serve_files(files: Sequence[TrajectoryFile], *, port: int, open_browser: bool, tell: Callable[[str], None]) -> None:
    """Serves the viewer until it is interrupted.

    Args:
        port: 0: a free one.
        tell: told of the address, and of what there is to know of the files.

    Raises:
        CannotListen: the port is taken.
    """
    for file in files:
        tell(f"{file.title}: {len(file.rows):,} episodes")
        for notice in file.notices:
            tell(f"{file.title}: {notice}")
    serve_on_loopback(
        lambda _: (viewer(files), "/"),
        port=port,
        open_browser=open_browser,
        tell=lambda address: tell(f"view: {address} (Ctrl-C ends it)"),
    )
