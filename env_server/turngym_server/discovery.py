"""Finds environments by name: ours, a third party's by entry point, or a class by its path."""

import importlib
import importlib.metadata
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Final

import turngym_server.envs
from turngym_server.environment import REGISTRY, EnvironmentSpec, Isolation
from turngym_server.errors import exception_text
from turngym_server.host import did_you_mean, nearest

ENTRY_POINTS: Final = "turngym.environments"
"""Group of entry points whose modules or classes register environments when they are loaded."""
ALL: Final = "all"


def load_own() -> None:
    """Registers every environment in `turngym_server.envs`."""
    for module in pkgutil.iter_modules(turngym_server.envs.__path__, "turngym_server.envs."):
        importlib.import_module(module.name)


def load_third_party() -> None:
    """Registers the environments of other installed packages.

    Raises:
        ValueError: one cannot be loaded.
    """
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A module that ends the process must not do so unheard.
            raise ValueError(
                f"entry point {entry_point.name!r} ({entry_point.value}) failed: {exception_text(error)}"
            ) from error


def find_specs(names: Sequence[str], isolated: Sequence[str] = ()) -> list[EnvironmentSpec]:
    """The environments of these names, each once, in order.

    Args:
        names: ids, `package.module:Class`, or `all`.
        isolated: ids of those whose instances are to have processes of their own, or `all`.

    Raises:
        ValueError: there is none of a name, or it cannot be imported.
    """
    load_own()
    if any(name not in REGISTRY for name in names):
        load_third_party()
    found: dict[str, EnvironmentSpec] = {}
    for name in names:
        for spec in _specs_of(name):
            found[spec.id] = spec
    for name in found if ALL in isolated else isolated:
        if name not in found:
            raise ValueError(f"--isolate {name!r} is not among the environments served: {', '.join(sorted(found))}")
        found[name] = replace(found[name], isolation=found[name].isolation or Isolation())
    return list(found.values())


def _specs_of(name: str) -> list[EnvironmentSpec]:
    if name == ALL:
        return [REGISTRY[id] for id in sorted(REGISTRY)]  # noqa: A001
    if name in REGISTRY:
        return [REGISTRY[name]]
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"no environment {name!r}{did_you_mean(nearest(name, REGISTRY))} "
            f"Known: {', '.join(sorted(REGISTRY))}; or package.module:Class"
        )
    try:
        environment = getattr(_imported(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Whatever a user's module raises, sys.exit included.
        raise ValueError(f"environment {name!r} cannot be imported: {_told(error)}") from error
    specs = [spec for spec in REGISTRY.values() if spec.environment is environment]
    if not specs:
        raise ValueError(f"{name!r} is not an environment decorated with @register")
    return specs


def _imported(module: str) -> ModuleType:
    """The module, from the working directory too, where no file takes an installed package's place."""
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109  # sys.path holds texts.
        sys.path.append(here)
    return importlib.import_module(module)


def _told(error: BaseException) -> str:
    """What was raised, and by which line."""
    *_, last = traceback.extract_tb(error.__traceback__)
    where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{exception_text(error)}{where}"
