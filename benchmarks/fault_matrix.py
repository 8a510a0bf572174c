"""What survives which fault: real processes, killed, stopped, cut off and replaced while episodes are played.

For each fault a server and two players (`fault_player.py`: trainer-like, each committing what it finished) play the
same episodes of six environments (`fault_environments.py`); the fault strikes once for each environment, while an
episode of it is under way. A cell is one fault and one environment. It holds if

1. every episode is committed once: none is missing, none is there twice;
2. where the environment promises bytes, every finished episode has the digests and rewards of the undisturbed run, turn
   by turn; what is lost is lost by name, for a reason that the fault allows (see `Fault.losses`), and where no
   reason is allowed nothing is lost;
3. nothing was played twice (below);
4. no reply came to another caller: each observation begins with its instance's mark and the number of actions
   executed, and the players compare both with what they played;
5. the fault did strike while an episode of the environment was under way, and no process logged an error.

Why 3 is sound. The environments note every action before they execute it, each under the random name of the
environment object that executes it, its *life*. A session is one life, and one that is made again by replay is
another, whose first actions are those of the replay. So the episode was played without repetition exactly if

- the actions of every life are a beginning of the undisturbed run's; an action executed twice would show as the same
  action twice in a row, which no player sends (`fault_player.turn_of`), or as a place too many at the end; and
- there are no more lives that executed anything than the fault explains: one, plus one for each strike that may end a
  session (a server's, a worker's or an instance's process's death, an expired lease, a move to another worker) or that
  makes a player begin anew; and none for ended sessions where the environment promises no determinism, so that it is
  never replayed (a reset that was sent again elsewhere leaves a life that executed nothing); and
- a life of each finished episode has all of its actions: nothing was made up.

Fault moments are drawn from the seed: a strike waits for a drawn episode to begin, and a drawn number of journal lines
more. What happens within the milliseconds of that moment is the machine's: where an environment's episodes were all
over before its strike fell, and nothing else is wrong, the fault is played again.

    python benchmarks/fault_matrix.py --seed 1

Prints the table; writes it beside this file as .txt, and as .json with what made it. Exit status 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Final

import grpc
import measure
from child import Child
from fault_journal import IDS, ISOLATED, JOURNAL, NEW_VERSION, SAME_VERSION, UNSURE, Note, mark_of, read_notes
from fault_player import FINISHED, LOST, REFUSED, Committed, level_seed_of, read_committed

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_server.processes.isolation import MOST_KILLED
from turngym_server.rng import Rng

HERE: Final = Path(__file__).parent
CLASSES: Final = ("NotedSokoban", "NotedFrozenLake", "NotedBandit", "Slow", "Isolated", "Unsure")
OPTIONS: Final = ("--splits", "all", "--log-level", "info")
PLAYERS: Final = (0, 1)
DEADLINE: Final = 1.0
"""Seconds, of the players' calls."""
LONGER: Final = 2.5
"""Seconds, longer than the deadline."""
SHORT_LEASE: Final = 1.5
START_SECONDS: Final = 60.0
RUN_SECONDS: Final = 240.0
POLL_SECONDS: Final = 0.005
STRIKE_BETWEEN: Final = (0.1, 0.7)
"""Share of an environment's episodes that have begun when its strike falls."""
MOST_LINES: Final = 4

EXPECTED_ERROR: Final = "its sessions are resumed by replay; starting another"
"""What may be logged: a front that it lost a worker."""

EVERY: Final = frozenset(IDS)
NOT_REPLAYABLE: Final = "NOT_REPLAYABLE"
VERSION_MISMATCH: Final = "VERSION_MISMATCH"
DIGEST_MISMATCH: Final = "DIGEST_MISMATCH"

NEVER_STRUCK: Final = "the fault never struck while an episode was under way"
MOST_TRIES: Final = 3
"""Runs of one fault, as long as all that is wrong is that it came too late."""


class StrikeTooLate(Exception):
    """What was to be struck is over. Says what is missing."""


class Scene:
    """One run: a server, a proxy where one is wanted, the players, and what they write."""

    def __init__(self, folder: Path, fault: Fault, episodes: int) -> None:
        self.folder = folder
        self.fault = fault
        self.episodes = episodes
        self.changed: list[str] = []
        self._journal = folder / "journal.jsonl"
        self._journal.touch()
        self._read = 0
        self._rest = b""
        self.notes: list[Note] = []
        self.killed: Counter[str] = Counter()
        self._port = "0"
        with (folder / "server.log").open("wb") as log:
            self._log = open("/dev/full", "wb") if fault.full_disk else os.fdopen(os.dup(log.fileno()), "wb")  # noqa: PTH123, SIM115
        self.server = self._serve()
        address = self.server_address
        self.proxy: Child | None = None
        if fault.proxied:
            self.proxy = Child([str(HERE / "fault_proxy.py"), address], self._open("proxy.log"), {})
            address = self.proxy.address()
        self._player_address = address
        self.players = {number: self._play(number) for number in PLAYERS}

    def _open(self, name: str) -> IO[bytes]:
        return (self.folder / name).open("ab")

    def _serve(self) -> Child:
        options = [option for name in CLASSES for option in ("--env", f"fault_environments:{name}")]
        server = Child(
            ["-m", "turngym_server.cli", *options, "--port", self._port, *OPTIONS, *self.fault.server],
            self._log,
            {JOURNAL: str(self._journal), self.fault.changes: ",".join(self.changed)},
        )
        self.server_address = server.address()
        self._port = self.server_address.rpartition(":")[2]
        return server

    def _play(self, number: int) -> Child:
        return Child(
            [
                str(HERE / "fault_player.py"),
                self._player_address,
                str(self.folder / f"player{number}.jsonl"),
                *("--player", str(number), "--episodes", str(self.episodes), "--deadline", str(DEADLINE)),
            ],
            self._open(f"player{number}.log"),
            {},
        )

    def restart_server(self, number: signal.Signals) -> None:
        self.server.end(number)
        self.server = self._serve()

    def restart_player(self, number: int) -> None:
        self.players[number].end(signal.SIGKILL)
        self.players[number] = self._play(number)

    def over(self) -> bool:
        """Whether every player has finished."""
        return all(player.process.poll() is not None for player in self.players.values())

    def read(self) -> None:
        """Reads what has been added to the journal."""
        with self._journal.open("rb") as journal:
            journal.seek(self._read)
            added = journal.read()
        self._read += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        self.notes += read_notes(lines)

    def committed(self) -> list[Committed]:
        return [each for number in PLAYERS for each in read_committed(self.folder / f"player{number}.jsonl")]

    def under_way(self, environment: str) -> set[str]:
        """Marks of episodes that have begun and are not committed."""
        over = {mark_of(each.level_seed) for each in self.committed() if each.environment == environment}
        return {note.mark for note in self.notes if note.environment == environment} - over

    def worker_of(self, environment: str) -> int:
        """The worker that has the latest life of an episode under way."""
        marks = self.under_way(environment)
        for note in reversed(self.notes):
            if note.mark in marks and (worker := self._worker(note.process)):
                return worker
        raise StrikeTooLate(f"no worker has an episode of {environment}")

    def _worker(self, process: int) -> int:
        """The worker that a process is or belongs to; 0: it is gone."""
        while process > 1 and (parent := parent_of(process)) != self.server.pid:
            process = parent
        return process if process > 1 else 0

    def errors(self) -> list[str]:
        """What the processes logged as errors."""
        errors: list[str] = []
        for path in sorted(self.folder.glob("*.log")):
            before = ""
            for line in path.read_text(errors="replace").splitlines():
                if EXPECTED_ERROR in line:
                    pass
                elif " ERROR " in line or (line.startswith("Traceback") and " ERROR " not in before):
                    errors.append(f"{path.name}: {line}")
                before = line
        return errors

    def close(self) -> None:
        for child in (*self.players.values(), self.server, *([self.proxy] if self.proxy else [])):
            child.end(signal.SIGKILL)
        self._log.close() if not self.fault.full_disk else None


def parent_of(process: int) -> int:
    """Its parent; 0: it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # The latter where it ends while its file is read.
        return 0


Strike = Callable[[Scene, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of the matrix.

    Attributes:
        strike: does it, for the sake of one environment, and ends when it is over.
        ends_sessions: environments whose episodes that are under way may have to be made again by replay.
        losses: reasons for which an episode may be lost, by environment; "" for every one, UNSURE's own added.
        changed_only: only the struck environment may lose any.
        server: arguments of the server. proxied: players reach it through the proxy.
        full_disk: the server's log cannot be written. changes: variable that names what follows other rules.
    """

    name: str
    strike: Strike | None
    ends_sessions: frozenset[str] = frozenset()
    restarts_players: bool = False
    losses: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    server: tuple[str, ...] = ()
    proxied: bool = False
    full_disk: bool = False
    changes: str = NEW_VERSION


def kill_server(scene: Scene, environment: str) -> None:
    scene.restart_server(signal.SIGKILL)


def drain_server(scene: Scene, environment: str) -> None:
    scene.restart_server(signal.SIGTERM)


def stop_server(scene: Scene, environment: str) -> None:
    scene.server.send(signal.SIGSTOP)
    time.sleep(LONGER)
    scene.server.send(signal.SIGCONT)


def kill_worker(scene: Scene, environment: str) -> None:
    os.kill(scene.worker_of(environment), signal.SIGKILL)


def stop_worker(scene: Scene, environment: str) -> None:
    worker = scene.worker_of(environment)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(LONGER)
    os.kill(worker, signal.SIGCONT)


def kill_instance(scene: Scene, environment: str) -> None:
    """Kills the process of an isolated episode that is under way; others' episodes must not notice.

    No episode's as often as would make it the environment's own failure.
    """
    while not scene.over():
        scene.read()
        marks = {mark for mark in scene.under_way(ISOLATED) if scene.killed[mark] < MOST_KILLED - 1}
        for note in reversed(scene.notes):
            if note.environment == ISOLATED and note.mark in marks and parent_of(note.process):
                os.kill(note.process, signal.SIGKILL)
                scene.killed[note.mark] += 1
                return
        time.sleep(POLL_SECONDS)
    raise StrikeTooLate("every episode is over")


def kill_player(scene: Scene, environment: str) -> None:
    # The one that has an episode of this environment under way.
    marks = scene.under_way(environment)
    for number in PLAYERS:
        seeds = [level_seed_of(number, environment, episode) for episode in range(scene.episodes)]
        if marks & {mark_of(seed) for seed in seeds}:
            scene.restart_player(number)
            return
    raise StrikeTooLate(f"no player has an episode of {environment}")


def stop_players(scene: Scene, environment: str) -> None:
    for player in scene.players.values():
        player.send(signal.SIGSTOP)
    time.sleep(LONGER)
    for player in scene.players.values():
        player.send(signal.SIGCONT)


def cut_connections(scene: Scene, environment: str) -> None:
    assert scene.proxy is not None
    scene.proxy.tell("cut 0.3")


def hold_connections(scene: Scene, environment: str) -> None:
    assert scene.proxy is not None
    scene.proxy.tell(f"hold {LONGER}")


def provoke_log_lines(scene: Scene, environment: str) -> None:
    with grpc.insecure_channel(scene.server_address) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)
        for number in range(50):
            item = pb.StepItem(session_id=f"nobody's.{number}", step_index=1, actions=["a"])
            reply = stub.Step(pb.StepRequest(items=[item]), timeout=10 * DEADLINE)
            assert reply.outcomes[0].HasField("error")


def change_environment(scene: Scene, environment: str) -> None:
    scene.changed.append(environment)
    scene.restart_server(signal.SIGKILL)


WORKERS: Final = ("--workers", "2")
REPLAY: Final = {UNSURE: frozenset({NOT_REPLAYABLE})}
"""What an ended session costs: only what cannot be played again."""


def _all_may(reason: str) -> Mapping[str, frozenset[str]]:
    return {each: frozenset({reason}) | REPLAY.get(each, frozenset()) for each in IDS}


UNDISTURBED: Final = Fault(name="none", strike=None)
FAULTS: Final = (
    Fault(name="server killed", strike=kill_server, ends_sessions=EVERY, losses=REPLAY),
    Fault(name="server drained", strike=drain_server, ends_sessions=EVERY, losses=REPLAY),
    Fault(name="server stopped", strike=stop_server),
    Fault(
        name="server with workers killed",
        strike=kill_server,
        ends_sessions=EVERY,
        losses=REPLAY,
        server=WORKERS,
    ),
    Fault(name="worker killed", strike=kill_worker, ends_sessions=EVERY, losses=REPLAY, server=WORKERS),
    Fault(name="worker stopped", strike=stop_worker, ends_sessions=EVERY, server=WORKERS),
    Fault(name="instance's process killed", strike=kill_instance, ends_sessions=frozenset({ISOLATED})),
    Fault(name="player killed", strike=kill_player, restarts_players=True),
    Fault(name="players stopped", strike=stop_players),
    Fault(
        name="players stopped past the lease",
        strike=stop_players,
        ends_sessions=EVERY,
        losses=REPLAY,
        server=("--lease-seconds", str(SHORT_LEASE)),
    ),
    Fault(name="connection cut", strike=cut_connections, proxied=True),
    Fault(name="connection delayed", strike=hold_connections, proxied=True),
    Fault(name="no room for logs", strike=provoke_log_lines, full_disk=True),
    Fault(name="new version", strike=change_environment, ends_sessions=EVERY, losses=_all_may(VERSION_MISMATCH)),
    Fault(
        name="other rules, same version",
        strike=change_environment,
        ends_sessions=EVERY,
        losses=_all_may(DIGEST_MISMATCH),
        changes=SAME_VERSION,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run left behind.

    Attributes:
        struck: strikes so far, by the environment for whose sake.
        strikes: strikes in all.
        errors: logged by the processes, or the reason why the run did not end.
    """

    committed: Sequence[Committed]
    notes: Sequence[Note]
    struck: Mapping[str, int]
    strikes: int
    errors: Sequence[str]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    fault: str
    environment: str
    finished: int
    lost: Mapping[str, int]
    lives: int
    failures: Sequence[str]

    @property
    def text(self) -> str:
        if self.failures:
            return f"FAILED {len(self.failures)}"
        lost = "".join(f", {count} named" for count in [sum(self.lost.values())] if count)
        return f"held {self.finished}{lost}"


@dataclass(frozen=True, slots=True)
class Moment:
    """When to strike for an environment's sake: when so many of its episodes have begun, and so many lines later.

    Not simply after so many lines: where episodes are lost, there are fewer.
    """

    environment: str
    episodes: int
    lines: int

    def place(self, notes: Sequence[Note]) -> int | None:
        """Where in the journal it comes; None: not yet."""
        marks: set[str] = set()
        left = self.lines
        for place, note in enumerate(notes):
            if note.environment == self.environment:
                if len(marks) >= self.episodes:
                    left -= 1
                marks.add(note.mark)
                if len(marks) >= self.episodes and left <= 0:
                    return place
        return None


def draw_moments(seed: int, row: int, undisturbed: Sequence[Note], episodes: int) -> list[Moment]:
    """One moment for each environment, drawn from the seed, in the order in which they came undisturbed."""
    rng = Rng(seed, row)
    least, most = (int(share * len(PLAYERS) * episodes) for share in STRIKE_BETWEEN)
    moments = [Moment(each, least + rng.below(most - least) + 1, rng.below(MOST_LINES)) for each in IDS]
    return sorted(moments, key=lambda moment: moment.place(undisturbed) or 0)


def play(fault: Fault, moments: Sequence[Moment], episodes: int, folder: Path) -> Run:
    """Plays all episodes while the fault strikes."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    ends = began + RUN_SECONDS
    struck: Counter[str] = Counter()
    late = ""
    with contextlib.closing(Scene(folder, fault, episodes)) as scene:
        for moment in moments:
            if fault.strike and _is_time(scene, moment, ends):
                with contextlib.suppress(StrikeTooLate):
                    fault.strike(scene, moment.environment)
                    struck[moment.environment] += 1
        while not scene.over() and not late:
            time.sleep(0.05)
            if time.monotonic() > ends:
                late = f"not all was played within {RUN_SECONDS:g} s"
        scene.read()
        codes = [f"player {number} ended with {player.process.returncode}" for number, player in scene.players.items()]
        if scene.server.process.poll() is not None:
            codes.append(f"the server ended with {scene.server.process.returncode}")
        errors = [*([late] if late else []), *(code for code in codes if not code.endswith("with 0")), *scene.errors()]
        return Run(
            committed=scene.committed(),
            notes=scene.notes,
            struck=struck,
            strikes=struck.total(),
            errors=errors,
            seconds=time.monotonic() - began,
        )


def _is_time(scene: Scene, moment: Moment, ends: float) -> bool:
    """Waits for the moment, with an episode under way. False where it does not come."""
    while not scene.over() and time.monotonic() < ends:
        scene.read()
        if moment.place(scene.notes) is not None and scene.under_way(moment.environment):
            return True
        time.sleep(POLL_SECONDS)
    return False


def judge(fault: Fault, environment: str, run: Run, undisturbed: Run, episodes: int) -> Cell:
    """What holds and what does not, by the rules in the head of this file."""
    committed = [each for each in run.committed if each.environment == environment]
    expected = {each.level_seed: each for each in undisturbed.committed if each.environment == environment}
    lives = lives_of(run.notes, environment)
    failures = [
        *(error for error in run.errors if environment in error or not any(each in error for each in IDS)),
        *_miscounted(committed, environment, episodes),
        *_wrong_outcomes(committed, fault.losses.get(environment, frozenset())),
        *([] if environment == UNSURE else _other_digests(committed, expected, fault.changes == SAME_VERSION)),
        *_wrong_lives(lives, fault, run, committed, lives_of(undisturbed.notes, environment), environment),
    ]
    if fault.strike and not run.struck.get(environment):
        failures.append(NEVER_STRUCK)
    return Cell(
        fault=fault.name,
        environment=environment,
        finished=sum(each.outcome == FINISHED for each in committed),
        lost=dict(Counter(each.reason for each in committed if each.outcome in (LOST, REFUSED))),
        lives=sum(len(each) for each in lives.values()),
        failures=failures,
    )


def lives_of(notes: Sequence[Note], environment: str) -> dict[str, list[list[str]]]:
    """By mark, the actions of each life that executed any, in order; places must count up from 0."""
    lives: defaultdict[str, list[Note]] = defaultdict(list)
    for note in notes:
        if note.environment == environment:
            lives[note.life].append(note)
    by_mark: defaultdict[str, list[list[str]]] = defaultdict(list)
    for life in lives.values():
        assert [note.place for note in life] == list(range(len(life))), life
        if len(life) > 1:
            by_mark[life[0].mark].append([note.action for note in life[1:]])
    return by_mark


def _miscounted(committed: Sequence[Committed], environment: str, episodes: int) -> list[str]:
    counts = Counter(each.level_seed for each in committed)
    due = [level_seed_of(number, environment, episode) for number in PLAYERS for episode in range(episodes)]
    return [
        *(f"episode {seed} is missing" for seed in due if not counts[seed]),
        *(f"episode {seed} was committed {count} times" for seed, count in counts.items() if count > 1),
    ]


def _wrong_outcomes(committed: Sequence[Committed], allowed: frozenset[str]) -> list[str]:
    return [
        f"episode {each.level_seed}: {each.outcome} [{each.reason}] {each.error}"
        for each in committed
        if each.outcome != FINISHED and not (each.outcome in (LOST, REFUSED) and each.reason in allowed)
    ]


def _other_digests(committed: Sequence[Committed], expected: Mapping[int, Committed], other_rules: bool) -> list[str]:
    """Differences from the undisturbed run. Where rules change unannounced, episodes may have others from the start."""
    failures: list[str] = []
    for each in committed:
        whole = expected[each.level_seed]
        played = len(each.digests)
        if other_rules and each.digests[:1] != whole.digests[:1]:
            continue
        if each.digests != whole.digests[:played] or each.rewards != whole.rewards[: len(each.rewards)]:
            failures.append(f"episode {each.level_seed}: digests or rewards differ from the undisturbed run's")
        elif each.outcome == FINISHED and played != len(whole.digests):
            failures.append(f"episode {each.level_seed}: {each.turns} turns, undisturbed {whole.turns}")
    return failures


def _wrong_lives(
    lives: Mapping[str, list[list[str]]],
    fault: Fault,
    run: Run,
    committed: Sequence[Committed],
    expected: Mapping[str, list[list[str]]],
    environment: str,
) -> list[str]:
    failures: list[str] = []
    replays = run.strikes if environment in fault.ends_sessions - {UNSURE} else 0
    most = 1 + replays + (run.strikes if fault.restarts_players else 0)
    for mark, those in lives.items():
        [whole] = expected[mark]
        failures += [
            f"instance {mark}: executed {life}, undisturbed {whole}" for life in those if life != whole[: len(life)]
        ]
        if len(those) > most:
            failures.append(f"instance {mark}: {len(those)} lives; expected at most {most}")
    for each in committed:
        mark = mark_of(each.level_seed)
        if each.outcome == FINISHED and expected[mark][0] not in lives[mark]:
            failures.append(f"instance {mark}: finished, but no life executed all of its actions")
    return failures


def table(cells: Sequence[Cell], faults: Sequence[Fault]) -> str:
    """The matrix, and below it what failed."""
    by_place = {(cell.fault, cell.environment): cell for cell in cells}
    width = max(len(fault.name) for fault in faults)
    heads = [each.removeprefix("noted_") for each in IDS]
    lines = [" ".join([f"{'fault':{width}}", *(f"{head:>18}" for head in heads)])]
    for fault in faults:
        row = [by_place[fault.name, each].text for each in IDS]
        lines.append(" ".join([f"{fault.name:{width}}", *(f"{text:>18}" for text in row)]))
    for cell in cells:
        lines += [f"{cell.fault}, {cell.environment}: {failure}" for failure in cell.failures[:10]]
    held = sum(not cell.failures for cell in cells)
    lines.append(f"{held} of {len(cells)} cells held")
    return "\n".join(lines) + "\n"


def run_matrix(faults: Sequence[Fault], seed: int, episodes: int, folder: Path) -> tuple[list[Cell], list[Run]]:
    """Plays the undisturbed run and one run for each fault; judges every cell."""
    undisturbed = play(UNDISTURBED, [], episodes, folder / "undisturbed")
    runs = [undisturbed]
    cells = [judge(UNDISTURBED, each, undisturbed, undisturbed, episodes) for each in IDS]
    for number, fault in enumerate(faults, start=1):
        moments = draw_moments(seed, number, undisturbed.notes, episodes)
        run, row = _played(fault, moments, episodes, folder, undisturbed)
        runs.append(run)
        cells += row
    return cells, runs


def _played(
    fault: Fault, moments: Sequence[Moment], episodes: int, folder: Path, undisturbed: Run
) -> tuple[Run, list[Cell]]:
    """One fault's run and its cells."""
    tries = 0
    while True:
        tries += 1
        run = play(fault, moments, episodes, folder / f"{fault.name.replace(' ', '_')}_{tries}")
        print(f"{fault.name}: {run.strikes} strikes in {run.seconds:.0f} s", file=sys.stderr, flush=True)
        cells = [judge(fault, each, run, undisturbed, episodes) for each in IDS]
        failures = {failure for cell in cells for failure in cell.failures}
        if failures != {NEVER_STRUCK} or tries == MOST_TRIES:
            return run, cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the fault moments")
    parser.add_argument("--episodes", type=int, default=12, help="of each environment, for each of two players")
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="some faults; nothing is written then")
    parser.add_argument("--keep", type=Path, help="keeps journals, commits and logs in this new folder")
    arguments = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"unknown faults {sorted(unknown)}; there are {names}")
    faults = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only]
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "runs"
        cells, runs = run_matrix(faults, arguments.seed, arguments.episodes, folder)
    rows = [UNDISTURBED, *faults]
    printed = table(cells, rows)
    print(printed, end="")
    if not arguments.only:
        (HERE / "fault_matrix.txt").write_text(printed)
        measure.write(
            "fault_matrix",
            {
                "seed": arguments.seed,
                "episodes": arguments.episodes,
                "deadline_seconds": DEADLINE,
                "stop_seconds": LONGER,
                "strikes": {fault.name: run.strikes for fault, run in zip(rows, runs, strict=True)},
                "cells": [asdict(cell) for cell in cells],
            },
        )
    if any(cell.failures for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
