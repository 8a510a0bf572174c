"""Many short trainings on a server of this machine, whose results are kept in a file as they come.

What the scripts about collapse share. A plan is a list of trainings by name; those that the file of results holds with
the same settings are not trained again, so a plan that was killed, or has grown by seeds, goes on with what is left.
Trainings run one after another, within this process and on one thread.
"""

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from small_policy import write_small_policy

from turngym_leaderboard.local_server import local_server
from turngym_leaderboard.record import code_record
from turngym_trainer.checkpoint import CHECKPOINTS, checkpoints, read_state
from turngym_trainer.grade import RunError
from turngym_trainer.recorded import RecordedRun, read_run
from turngym_trainer.settings import load_config
from turngym_trainer.train import train
from turngym_trainer.warm_start import warm_start

COMMON: Final = (
    "run.threads=1",
    "run.trajectories_every=0",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.prefill='<think></think><answer>'",
    "warm_start.explain=false",
    "warm_start.detours=0.0",
    "warm_start.target_success=1.0",
    "warm_start.episodes=1000",
    "warm_start.max_steps=60",
    "warm_start.check_every=60",
    "warm_start.check_episodes=256",
)
"""Of every training: the tiny policy reads the last turn alone and answers without reasoning."""


VALIDATED: Final = ("success", "low", "valid_format")


@dataclass(frozen=True, slots=True)
class Training:
    """One training to do.

    Attributes:
        name: what the results call it.
        settings: `section.key=value`, without server, folder and policy.
        preset: see `trainer settings`.
        start: settings of the warm start that it begins from; `policy.model=small` there is the one of `small_policy`.
    """

    name: str
    settings: tuple[str, ...]
    preset: str
    start: tuple[str, ...]

    def content(self) -> dict[str, object]:
        """What decides its result, as plain data."""
        return json.loads(json.dumps({key: value for key, value in asdict(self).items() if key != "name"}))


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation of a training.

    Attributes:
        update: updates made before it, of at least one optimiser step each. optimiser_step: the steps of them all.
        low: lower end of Wilson's 95 % interval of `success`.
    """

    iteration: int
    update: int
    optimiser_step: int
    success: float
    low: float
    valid_format: float


@dataclass(frozen=True, slots=True)
class Warned:
    """An alarm of the guard. `update`: updates made when it was given."""

    kind: str
    iteration: int
    update: int
    told: str


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training came to.

    Attributes:
        content: what decided it, see `Training.content`.
        commit: of the code, None outside of a checkout.
        validations, alarms: in order.
        iterations: how far it came. rollbacks: how often the guard went back.
        stopped: why it ended before its last iteration; empty: it did not.
        episodes, kept: played for learning, and learnt from, up to each validation.
        clipped: mean share of tokens whose gradient a clip took away.
    """

    name: str
    content: Mapping[str, object]
    commit: str | None
    seconds: float
    validations: tuple[Validation, ...]
    alarms: tuple[Warned, ...]
    iterations: int
    rollbacks: int
    stopped: str
    episodes: tuple[int, ...]
    kept: tuple[int, ...]
    clipped: float

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Trained":
        """What `asdict` and JSON made of one."""
        return cls(
            **{
                **plain,
                "validations": tuple(Validation(**each) for each in plain["validations"]),
                "alarms": tuple(Warned(**each) for each in plain["alarms"]),
                "episodes": tuple(plain["episodes"]),
                "kept": tuple(plain["kept"]),
            }
        )


@contextlib.contextmanager
def server(
    environments: Sequence[str], folder: Path | None, *, splits: str = "all", more: Sequence[str] = ()
) -> Generator[tuple[str, Path]]:
    """A server of some environments, and a folder to train in: the given one, else a temporary one.

    A SIGTERM ends the server too.
    """
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with contextlib.ExitStack() as stack:
            home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            home.mkdir(parents=True, exist_ok=True)
            arguments = [part for each in environments for part in ("--env", each)]
            address = stack.enter_context(local_server([*arguments, "--splits", splits, *more], home / "server.log"))
            yield address, home
    finally:
        signal.signal(signal.SIGTERM, previous)


def train_all(
    plan: Sequence[Training],
    address: str,
    folder: Path,
    results: Path,
    *,
    tell: Callable[[Mapping[str, Trained]], None] = lambda so_far: None,
) -> dict[str, Trained]:
    """Does what is left of a plan. Returns everything that the file of results holds, by name.

    Args:
        address: of a server.
        folder: for warm starts, which are kept, and trainings, which are not.
        results: JSON, written anew after each training. What it holds beside the plan stays.
        tell: told what there is so far, after each training.
    """
    found = read_results(results)
    for training in plan:
        held = found.get(training.name)
        if held is not None and held.content == training.content():
            continue
        found[training.name] = _trained(training, address, folder)
        write_results(results, found)
        last = found[training.name]
        print(f"{training.name}: {last.validations[-1].success:.3f}, {last.seconds:.0f} s", flush=True)
        tell(found)
    return found


def read_results(file: Path) -> dict[str, Trained]:
    """The trainings that a file of results holds, by name; none where there is no file."""
    if not file.exists():
        return {}
    plain = json.loads(file.read_text(encoding="utf-8"))["trainings"]
    return {each["name"]: Trained.from_plain(each) for each in plain}


def write_results(file: Path, found: Mapping[str, Trained], more: Mapping[str, object] | None = None) -> None:
    """Writes trainings with what made them, and `more` before them. Written aside first: a kill loses nothing."""
    lines = ",\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in found.values())
    head = json.dumps({"code": code_record().model_dump(mode="json"), **(more or {})}, indent=1, ensure_ascii=False)
    aside = file.with_suffix(".partial")
    aside.write_text(f'{head[:-2]},\n "trainings": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    aside.replace(file)


def _trained(training: Training, address: str, folder: Path) -> Trained:
    began = time.perf_counter()
    policy = _started(training, address, folder)
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    config = load_config(
        preset=training.preset,
        settings=[*COMMON, *training.settings, f"run.server={address}", f"run.folder={run}", f"policy.model={policy}"],
    )
    stopped = ""
    try:
        train(config, tell=lambda line: None)
    except RunError as error:
        stopped = str(error).partition(". ")[0].replace(str(run), "run")
    return _result(training, read_run(run), stopped, time.perf_counter() - began)


def _started(training: Training, address: str, folder: Path) -> Path:
    """The policy that a training begins with. Its warm start is done once for all trainings that ask for the same."""
    config = load_config(settings=[*COMMON, *training.start, f"run.server={address}"])
    if config.policy.model == "small":
        small = folder / "small"
        if not small.exists():
            write_small_policy(small)
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"model": str(small)})})
    known = folder / "starts.json"
    starts: list[list[str]] = json.loads(known.read_text(encoding="utf-8")) if known.exists() else []
    if list(training.start) not in starts:
        starts.append(list(training.start))
        known.write_text(json.dumps(starts), encoding="utf-8")
    policy = folder / f"start-{starts.index(list(training.start))}"
    if not (policy / "warm_start.json").exists():
        shutil.rmtree(policy, ignore_errors=True)
        run = config.run.model_copy(update={"folder": str(policy)})
        done = warm_start(config.model_copy(update={"run": run}))
        print(f"warm start {policy.name}: {done.checks[-1].success:.3f} {' '.join(training.start)}", flush=True)
    return policy


def _result(training: Training, run: RecordedRun, stopped: str, seconds: float) -> Trained:
    played = list(accumulate(int(line["train/episodes"] or 0) for line in run.metrics))
    kept = list(accumulate(int(line["update/kept_episodes"] or 0) for line in run.metrics))
    updates = [int(line["update"] or 0) for line in run.metrics]
    clipped = [
        (line["update/clip_high"] or 0.0) + (line["update/clip_low"] or 0.0)
        for line in run.metrics
        if line.get("update/actor_steps")
    ]
    at = [index for index, line in enumerate(run.metrics) if line.get("validation/success") is not None]
    return Trained(
        name=training.name,
        content=training.content(),
        commit=code_record().commit,
        seconds=round(seconds, 1),
        validations=tuple(
            Validation(
                index + 1,
                updates[index],
                int(run.metrics[index]["optimiser_step"] or 0),
                *(
                    float(run.metrics[index][f"validation/{name}"] or 0.0)
                    for name in ("success", "low", "valid_format")
                ),
            )
            for index in at
        ),
        alarms=tuple(
            Warned(a.kind, a.iteration, updates[min(a.iteration, len(updates)) - 1], a.told) for a in run.alarms
        ),
        iterations=run.iteration,
        rollbacks=read_state(checkpoints(run.folder / CHECKPOINTS)[-1]).progress.attempt,
        stopped=stopped,
        episodes=tuple(played[index] for index in at),
        kept=tuple(kept[index] for index in at),
        clipped=fmean(clipped) if clipped else 0.0,
    )
