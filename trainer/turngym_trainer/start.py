"""What must hold before a run writes anything: a server answers, and serves the environment and its splits.

Also the run's folder, which is taken once they do. Knows nothing of policies.
"""

import contextlib
import logging
import tempfile
import threading
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Final

from turngym_client import Client, EnvironmentInfo, Split, connect
from turngym_trainer.config import Config
from turngym_trainer.evaluate import environment_limits
from turngym_trainer.settings import ConfigError

_LOG = logging.getLogger(__name__)

_SILENT_SECONDS: Final = 2.0
"""How long a server may take to answer before the user is told what is waited for."""


def connected(config: Config) -> Client:
    """A client of the run's servers.

    Raises:
        ConfigError: an address or token is none, or a token's or certificate's file cannot be read.
    """
    try:
        return connect(list(config.run.server), patience=config.run.patience)
    except (ValueError, OSError) as error:
        raise ConfigError(f"no client for run.server {', '.join(config.run.server)}: {error}") from error


def take_folder(folder: Path) -> None:
    """Makes the run's folder, so that nothing is trained which could not be kept.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: no path at all, for a NUL in it.
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"run.folder {folder} cannot be written: {why}; name another") from error


def served_environment(client: Client, config: Config, splits: Collection[Split]) -> EnvironmentInfo:
    """The environment that the settings ask for, once a server has said that it serves all of `splits`.

    Raises:
        ConfigError: a split is not served; names the settings to change.
        TurngymError: no server answers, or the environment is unknown or refuses its options or limits.
    """
    with _tell_of_waiting(config.run.server):
        info = client.environment(
            config.environment.id, options=config.environment.options, limits=environment_limits(config.environment)
        )
    served = [split for split in Split if split in info.splits and info.splits[split].served]
    if missing := [split for split in Split if split in splits and split not in served]:
        raise ConfigError(
            f"{info.id}: split {_names(missing)} is not served by {', '.join(config.run.server)}; "
            f"served: {_names(served) or 'none'}; {_remedy(missing, served, shows_token=client.shows_token)}"
        )
    return info


def _remedy(missing: Collection[Split], served: Collection[Split], *, shows_token: bool) -> str:
    if Split.ALL in served:
        return "set environment.split=all and validation.split=all"
    if Split.TRAIN in served and Split.VALIDATION in served:
        return "set environment.split=train and validation.split=validation"
    if shows_token:
        return "this token's role does not allow it, or the server was started without it; ask the server's operator"
    return f"start the server with {_names(missing)} among its --splits"


def _names(splits: Collection[Split]) -> str:
    return ", ".join(split.value for split in splits)


@contextlib.contextmanager
def _tell_of_waiting(servers: Collection[str]) -> Generator[None]:
    """Warns once where what is inside takes long: the client goes on trying for `run.patience`."""
    timer = threading.Timer(_SILENT_SECONDS, _LOG.warning, ["waiting for %s …", ", ".join(servers)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
