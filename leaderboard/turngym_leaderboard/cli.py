"""The command `leaderboard`: evaluate agents, show and verify records; make boards and play what is submitted to them.

Exit codes: 0 done; 1 a record does not stand up to `verify`, or of several some cannot be shown; 2 what was asked for
cannot be done, in one line.
"""

import difflib
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from turngym.command import run_command
from turngym_client import Limits, Split
from turngym_leaderboard import record as records
from turngym_leaderboard import tables
from turngym_leaderboard.agents import Agent
from turngym_leaderboard.agents.chat_completions import EndpointSettings
from turngym_leaderboard.agents.endpoint import EndpointAgent
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.board_commands import Data, Database, board, worker_command
from turngym_leaderboard.console import connected, one_line_errors, progress_bar, tell
from turngym_leaderboard.evaluation import CannotEvaluate, evaluate
from turngym_leaderboard.protocol import REFERENCE, Decoding, Protocol
from turngym_leaderboard.record import RecordError
from turngym_leaderboard.service_commands import serve_command, show_submission, status_command, submit_command, token
from turngym_leaderboard.verify import (
    SAMPLED,
    Sample,
    checked,
    episodes_to_play,
    most_tokens,
    unchecked,
    verify,
    verify_trajectories,
)

OUT: Final = Path("runs/leaderboard")

app = typer.Typer(
    help="Scores agents on held-out instances.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
app.add_typer(board, name="board")
app.command("worker")(worker_command)
app.command("serve")(serve_command)
app.command("submit")(submit_command)
app.command("status")(status_command)
app.add_typer(token, name="token")
SETTINGS: Final = "; ".join(
    f"{key}{'' if field.is_required() or field.default in ('', None) else f'={field.default}'}: "
    + (field.description or "").rstrip(".")
    for key, field in EndpointSettings.model_fields.items()
)
"""Every setting of an endpoint with its default, for the help."""
_AGENT: Final = re.compile(r"(?:(?P<name>[^=:]+)=)?(?P<kind>[a-z]+)(?::(?P<path>.+))?")

Server = Annotated[list[str], typer.Option(help="host:port of an environment server; several may be given.")]


@app.command("evaluate")
def evaluate_command(
    agent: Annotated[
        list[str],
        typer.Option(
            help="[NAME=]checkpoint:PATH, [NAME=]endpoint:URL, random or oracle; several may be given and are then "
            "compared."
        ),
    ],
    env: Annotated[str, typer.Option(help="Environment id.")],
    server: Server,
    instances: Annotated[int, typer.Option(min=1, help="Distinct worlds to play.")] = REFERENCE.instances,
    attempts: Annotated[int, typer.Option(min=1, help="Episodes on each.")] = REFERENCE.attempts,
    split: Annotated[Split, typer.Option(help="Whose levels are played.")] = REFERENCE.split,
    greedy: Annotated[bool, typer.Option("--greedy", help="Most likely tokens instead of sampled ones.")] = False,
    also_greedy: Annotated[bool, typer.Option("--also-greedy", help="Rows for both ways.")] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = REFERENCE.decoding.temperature,
    seed: Annotated[int, typer.Option(help="Decides levels, noise and sampling.")] = REFERENCE.seed,
    turns: Annotated[
        int, typer.Option(min=0, help="Turns an episode; 0: the environment's, or of a level file the level's own.")
    ] = REFERENCE.limits.max_turns,
    actions: Annotated[
        int, typer.Option(min=0, help="Actions an episode; 0: as with --turns.")
    ] = REFERENCE.limits.max_actions,
    actions_per_turn: Annotated[
        int, typer.Option(min=0, help="Actions of a turn that are run; 0: as with --turns.")
    ] = REFERENCE.limits.max_actions_per_turn,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the environment; JSON or a plain string.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME:]KEY=VALUE", help=f"Setting of endpoints, or of one of them. {SETTINGS}"),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Episodes held at once.")] = 128,
    device: Annotated[str, typer.Option(help="Where checkpoints run: cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Torch threads; 0: as many as torch takes.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder that records are written into.")] = OUT,
) -> None:
    """Plays agents between a random player and the oracle on the same held-out levels, and keeps a record."""
    console = Console()
    with one_line_errors():
        options = _options(option or [])
        try:
            protocol = Protocol(
                environment=env,
                options=options,
                split=split,
                instances=instances,
                limits=Limits(max_turns=turns, max_actions=actions, max_actions_per_turn=actions_per_turn),
                attempts=attempts,
                decoding=Decoding(temperature, greedy),
                seed=seed,
            )
        except ValueError as error:
            raise CannotEvaluate(str(error)) from error
        agents = [_agent(text, device=device, threads=threads, endpoint=endpoint or []) for text in agent]
        with connected(server) as client, progress_bar(console) as bar:
            tasks: dict[str, TaskID] = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done, total=total)

            records.prepare(out)
            evaluation = evaluate(
                client,
                protocol,
                agents,
                server=server,
                also_greedy=also_greedy,
                sessions=sessions,
                progress=progress,
            )
        folder = records.save(evaluation.record, evaluation.trajectories, out)
    tables.show(console, evaluation.record)
    console.print(f"record: {folder / records.RECORD}", soft_wrap=True, highlight=False)
    console.print(f"trajectories: {folder / records.TRAJECTORIES}", soft_wrap=True, highlight=False)


@app.command("show")
def show_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER|ID", help="A record, or a folder of records; with --board a submission.")
    ] = OUT,
    board: Annotated[str, typer.Option(help="Address of the board that the submission ID is on.")] = "",
) -> None:
    """Prints the records kept, oldest first, or where a submission to a board stands."""
    if board:
        show_submission(str(folder), board)
        return
    console = Console()
    with one_line_errors():
        found = records.find(folder)
        if not found:
            raise RecordError(f"{folder} holds no records; `leaderboard evaluate` writes them")
        bad: list[str] = []
        for place in found:
            try:
                record = records.load(place)
            except RecordError as error:
                bad.append(str(error))
                continue
            console.rule(str(place))
            tables.show(console, record)
        for message in bad:
            tell(message)
        if bad:
            raise typer.Exit(1 if len(bad) < len(found) else 2)


@app.command("verify")
def verify_command(
    record: Annotated[Path, typer.Argument(help="The record's folder or file.")],
    server: Server,
    policy: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a checkpoint of the record, which then chooses again; several may be given."),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Most episodes of a row in which its policy chooses again.")
    ] = SAMPLED,
    sample_seed: Annotated[
        int | None, typer.Option(help="Draws those episodes; unless given, it is drawn itself, and printed.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where policies run: cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Torch threads; 0: as many as torch takes.")] = 0,
) -> None:
    """Plays a record again and compares all that it tells: levels, seeds, choices, rewards, statistics, trajectories.

    Whether a checkpoint chose its actions can be checked only with --policy. What was not checked is printed.
    """
    console = Console()
    with one_line_errors():
        loaded = records.load(record)
        policies = [
            _checkpoint(folder, name=str(folder), device=device, threads=threads, most_tokens=most_tokens(loaded))
            for folder in policy or []
        ]
        drawn = Sample(sample, secrets.randbits(32) if sample_seed is None else sample_seed)
        faults = verify_trajectories(record, loaded)
        intact = loaded.trajectories is not None and records.trajectories_fault(record, loaded) is None
        trajectories = records.load_trajectories(record if record.is_dir() else record.parent) if intact else []
        total = episodes_to_play(loaded, policies, drawn)
        with connected(server) as client, progress_bar(console) as bar:
            task = bar.add_task("replay", total=total)
            faults += verify(
                client,
                loaded,
                trajectories=trajectories,
                policies=policies,
                sample=drawn,
                on_episodes=lambda count: bar.advance(task, count),
            )
    for fault in faults:
        console.print(fault, soft_wrap=True, highlight=False, markup=False)
    for sentence in checked(loaded, policies, drawn):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    for sentence in unchecked(loaded, policies, trajectories=intact):
        console.print(f"not checked: {sentence}", soft_wrap=True, highlight=False, markup=False)
    resolved = sum(episode.outcome != "unresolved" for row in loaded.rows for episode in row.episodes)
    if faults:
        differences = "1 difference" if len(faults) == 1 else f"{len(faults)} differences"
        console.print(f"the record does not stand: {differences} over {resolved} episodes")
        raise typer.Exit(1)
    covered = (
        f"{records.TRAJECTORIES} is as it was saved"
        if loaded.trajectories
        else f"{records.TRAJECTORIES} is not covered: the record was made before records held its SHA-256"
    )
    console.print(
        f"the record stands: {resolved} episodes were played again, with the same digests and scores; {covered}",
        soft_wrap=True,
    )


@app.command("view")
def view_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE [FILE]", help="A trajectories.jsonl, or the folder of a run or record; or two."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of the loopback; 0: a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Shows the episodes of a training run or an evaluation in the browser, turn by turn, until Ctrl-C.

    Files may be larger than memory, and may still be written: the page shows what there is.
    """
    console = Console()
    with one_line_errors():
        try:
            # Here and nowhere else: everything but pages works without a web server.
            from turngym_leaderboard.pages.view_files import CannotListen, CannotView, open_files, serve_files
        except ModuleNotFoundError as error:
            raise CannotEvaluate(f"pages need more packages: pip install 'turngym[board]' ({error})") from error
        try:
            with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
                tasks: dict[str, TaskID] = {}

                def progress(what: str, done: int, total: int) -> None:
                    if what not in tasks:
                        tasks[what] = bar.add_task(what, total=total)
                    bar.update(tasks[what], completed=done, total=total)

                opened = open_files(files, progress=progress)
            serve_files(opened, port=port, open_browser=open_browser, tell=lambda said: typer.echo(said))
        except (CannotListen, CannotView) as error:
            raise CannotEvaluate(str(error)) from error


@app.command("play")
def play_command(
    server: Server,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Episodes that you keep are appended here, a line of JSON each.")
    ] = None,
    idle_minutes: Annotated[
        float, typer.Option(min=0.1, help="An episode that no browser has shown for so long is closed.")
    ] = 30.0,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of the loopback; 0: a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
) -> None:
    """Lets you play a server's environments in the browser, as an agent does, until Ctrl-C.

    The printed address holds a secret of this start: whoever has it may play, and keep. Kept episodes are
    demonstrations for `trainer warm-start`. Browsers of other machines come by a tunnel: ssh -L PORT:127.0.0.1:PORT.
    """
    with one_line_errors():
        try:
            from turngym_leaderboard.playground.start import CannotKeep, CannotListen, play
        except ModuleNotFoundError as error:
            raise CannotEvaluate(f"pages need more packages: pip install 'turngym[board]' ({error})") from error
        with connected(server) as client:
            client.environments()  # Says at once that there is no server, or no token that it knows.
        try:
            play(
                server,
                keep=keep,
                idle_seconds=60 * idle_minutes,
                port=port,
                open_browser=open_browser,
                tell=lambda said: typer.echo(said),
            )
        except (CannotKeep, CannotListen) as error:
            raise CannotEvaluate(str(error)) from error


@app.command("export")
def export_command(
    data: Data,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the site is written; an earlier export there is replaced.")
    ],
    database: Database = "",
) -> None:
    """Writes the public pages of all boards as files: a site that can be put anywhere, or opened from the folder."""
    with one_line_errors():
        try:
            # Here and nowhere else: everything but boards works without a database.
            from turngym_leaderboard.pages.export import CannotExport, export
            from turngym_leaderboard.pages.from_store import BoardSource
            from turngym_leaderboard.store import StoreError, open_store
            from turngym_leaderboard.store.database import FILE
        except ModuleNotFoundError as error:
            raise CannotEvaluate(f"boards need more packages: pip install 'turngym[board]' ({error})") from error
        # Opening it would make one.
        if not (data / FILE).is_file() and not database:
            raise CannotEvaluate(f"{data} holds no {FILE}; name the folder that the boards lie in")
        try:
            with open_store(data, database) as store:
                written = export(BoardSource(store), folder)
        except (CannotExport, StoreError) as error:
            raise CannotEvaluate(str(error)) from error
    typer.echo(
        f"boards: {written.boards}, submissions: {written.submissions}, episodes: {written.episodes}, "
        f"pages: {written.pages}, beginning with {folder / 'index.html'}"
    )


def _agent(text: str, *, device: str, threads: int, endpoint: Sequence[str]) -> Agent:
    """Makes the agent that a command line names."""
    match = _AGENT.fullmatch(text)
    name, kind, path = match.group("name", "kind", "path") if match else (None, "", None)
    if kind == "random" and not name and not path:
        return RandomAgent()
    if kind == "oracle" and not name and not path:
        return OracleAgent()
    if kind == "checkpoint" and path:
        return _checkpoint(Path(path), name=name or path, device=device, threads=threads)
    if kind == "endpoint" and path:
        return EndpointAgent(path, endpoint_settings(endpoint, name or path), name=name or path)
    raise CannotEvaluate(f"--agent {text!r}: expected [NAME=]checkpoint:PATH, [NAME=]endpoint:URL, random or oracle")


def endpoint_settings(settings: Sequence[str], name: str) -> EndpointSettings:
    """The settings of the endpoint of this name, from `key=value` and `name:key=value`; the latter go first.

    Raises:
        CannotEvaluate: a key is unknown, a value is none of its, or there is no model.
    """
    of_all, of_one = dict[str, str](), dict[str, str]()
    for setting in settings:
        left, equals, value = setting.partition("=")
        agent, colon, key = left.rpartition(":")
        if not equals or not key:
            raise CannotEvaluate(f"--endpoint {setting!r}: expected [NAME:]KEY=VALUE")
        if key not in EndpointSettings.model_fields:
            near = difflib.get_close_matches(key, EndpointSettings.model_fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(EndpointSettings.model_fields)}"
            raise CannotEvaluate(f"--endpoint {setting!r}: there is no {key}; {hint}")
        if not colon or agent == name:
            (of_one if colon else of_all)[key] = value
    try:
        return EndpointSettings.model_validate(of_all | of_one)
    except ValidationError as error:
        first = error.errors()[0]
        what = f" {first['loc'][0]}" if first["loc"] else ""
        missing = "; name the model with --endpoint model=NAME" if first["loc"] == ("model",) else ""
        raise CannotEvaluate(f"--endpoint{what} of {name}: {first['msg']}{missing}") from error


def _checkpoint(folder: Path, *, name: str, device: str, threads: int, most_tokens: int = 0) -> Agent:
    try:
        # Here and nowhere else: everything but this agent works without torch.
        from turngym_leaderboard.agents.checkpoint import CheckpointAgent
    except ModuleNotFoundError as error:
        raise CannotEvaluate(f"checkpoints need the trainer: pip install 'turngym[trainer]' ({error})") from error
    return CheckpointAgent(folder, name=name, device=device, threads=threads, most_tokens=most_tokens)


def _options(settings: Sequence[str]) -> dict[str, object]:
    """`key=value` settings; a value is JSON, or where it is none, a string."""
    options: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise CannotEvaluate(f"--option {setting!r}: expected key=value")
        try:
            options[key] = json.loads(text, parse_constant=_no_number)
        except json.JSONDecodeError:
            options[key] = text
        except (ValueError, RecursionError) as error:
            raise CannotEvaluate(f"--option {key}: {error}") from error
    return options


def _no_number(text: str) -> NoReturn:
    # JSON has none of these; Python would write them into a record that nobody else reads.
    raise ValueError(f"{text} is no number of JSON")


def main() -> None:
    """Runs the command."""
    run_command(app, "leaderboard")


if __name__ == "__main__":
    main()
