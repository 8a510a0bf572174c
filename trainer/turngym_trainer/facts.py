"""What a run was started on: the environment as the server resolved it, its known scores, and the packages.

Kept beside the settings, so that a run can be read when its server is gone, and before it has a checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from turngym_client import EnvironmentInfo, Reference, Split
from turngym_trainer.checkpoint import EnvironmentIdentity, versions

FACTS: Final = "run.json"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run was started on, or last resumed on.

    Attributes:
        floor, ceiling: success of a random and of the best possible player on the validation split; None: unknown, or
            there are several environments.
        versions: of the packages that a run's last bits depend on.
        others: the further environments of a mixture, in its order.
    """

    environment: EnvironmentIdentity
    floor: Reference | None
    ceiling: Reference | None
    versions: dict[str, str]
    others: tuple[EnvironmentIdentity, ...] = ()

    @staticmethod
    def of(infos: Sequence[EnvironmentInfo], split: Split) -> "Facts":
        """Facts of a run in some environments that is validated on `split`, on this machine as it is."""
        about = infos[0].splits.get(split) if len(infos) == 1 else None
        return Facts(
            EnvironmentIdentity.of(infos[0]),
            about.floor if about else None,
            about.ceiling if about else None,
            versions(),
            tuple(EnvironmentIdentity.of(info) for info in infos[1:]),
        )


def write_facts(folder: Path, facts: Facts) -> None:
    """Writes run.json aside and renames it: it is never half there."""
    aside = folder / f".{FACTS}"
    aside.write_text(json.dumps(asdict(facts), indent=1, ensure_ascii=False), encoding="utf-8")
    aside.replace(folder / FACTS)


def read_facts(folder: Path) -> Facts | None:
    """The facts of the run in a folder; None where there are none (a run of a release that wrote none).

    Raises:
        ValueError: they cannot be read.
    """
    file = folder / FACTS
    if not file.exists():
        return None
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        return Facts(
            EnvironmentIdentity(**held["environment"]),
            Reference(**held["floor"]) if held["floor"] else None,
            Reference(**held["ceiling"]) if held["ceiling"] else None,
            {str(name): str(version) for name, version in held["versions"].items()},
            tuple(EnvironmentIdentity(**other) for other in held.get("others", [])),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is not what a run writes: {error!r}; remove it, and the report does without"
        ) from error
