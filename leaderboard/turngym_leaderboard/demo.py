"""The whole path on one machine: serve, train, score, submit. `make demo` runs it.

Every part is a command of its own, printed as a user would type it, so nothing of the trainer or the server is imported
here. The server listens on a free port of the loopback interface and is stopped whatever happens.
"""

import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from turngym_leaderboard.local_server import ServerFailed, local_process, local_server
from turngym_leaderboard.tables import percent

if TYPE_CHECKING:
    from turngym_leaderboard.pages.views import Estimate

SETTINGS: Final = Path(__file__).with_name("demo.toml")
"""The trainer's settings, for both the warm start and the training that follows."""

BOARD: Final = """\
name = "demo"
title = "Sokoban on this machine"
season = "local"
sealed = false

[[environments]]
id = "sokoban"
instances = {instances}
"""
"""Defines the board that the trained checkpoint is submitted to; nothing on it has to be kept from anybody."""
SLUG: Final = "demo-local"
SUBMITTED: Final = "after RL"
"""What the board, and the trained policy on it, are called."""


class DemoFailed(Exception):
    """A part of the demo failed. The message says which, and where to look."""


def demo(
    folder: Annotated[Path | None, typer.Option(help="Where everything is written; default: runs/demo-<time>.")] = None,
    instances: Annotated[int, typer.Option(min=1, help="Held-out worlds of the evaluation.")] = 512,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value for the trainer, over the demo's settings.")
    ] = None,
) -> None:
    """Serves Sokoban, warm-starts a tiny policy, improves it by StarPO-S, scores before and after, and submits it."""
    console = Console()
    began = time.monotonic()
    home = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S", time.gmtime())
    try:
        home.mkdir(parents=True)
        with _server(home / "server.log", console) as address:
            checkpoint = _train_and_score(home, address, instances, set_ or [], console)
            page = _submit(home, address, checkpoint, max(instances, 2), console)
    except FileExistsError:
        _fail(console, f"{home} exists already; name another --folder")
    except (DemoFailed, ServerFailed) as error:
        _fail(console, str(error))
    except KeyboardInterrupt:
        _fail(console, f"interrupted; what was written is in {home}")
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. Everything is in {home}:", highlight=False)
    console.print(f"  {home / 'warm-start'}  the policy before RL, in Hugging Face's layout", soft_wrap=True)
    console.print(f"  {home / 'rl'}  the run: settings, metrics.jsonl, trajectories.jsonl, checkpoints", soft_wrap=True)
    console.print(f"  {home / 'leaderboard'}  the evaluation's record and trajectories", soft_wrap=True)
    console.print(f"  {home / 'board'}  the board, which `leaderboard serve` shows and plays on", soft_wrap=True)
    console.print(
        f"On its board, {_standing(home / 'board')}: {page.resolve().as_uri()}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _train_and_score(home: Path, address: str, instances: int, settings: Sequence[str], console: Console) -> Path:
    """Gives the checkpoint that came of it."""
    common = ["--config", str(SETTINGS), *(part for setting in settings for part in ("--set", setting))]
    common += ["--set", f'run.server=["{address}"]']
    before, run = home / "warm-start", home / "rl"
    warm_start = ["warm-start", *common, "--set", f'run.folder="{before}"']
    _run("warm start from the oracle's play", "trainer", warm_start, console)
    train = ["train", *common, "--set", f'run.folder="{run}"', "--set", f'policy.model="{before}"']
    _run("StarPO-S against the server", "trainer", train, console)
    checkpoint = _last_checkpoint(run)
    agents = ["--agent", f"warm start=checkpoint:{before}", "--agent", f"after RL=checkpoint:{checkpoint}"]
    evaluate = ["evaluate", *agents, "--env", "sokoban", "--server", address, "--instances", str(instances)]
    out = ["--also-greedy", "--out", str(home / "leaderboard")]
    _run("evaluation on held-out levels", "leaderboard", [*evaluate, *out], console)
    return checkpoint


def _submit(home: Path, address: str, checkpoint: Path, instances: int, console: Console) -> Path:
    """Submits a checkpoint to a board of its own, and writes the board's pages; gives the one that shows it."""
    data, definition, token, site = home / "board", home / "board.toml", home / "board.token", home / "site"
    definition.write_text(BOARD.format(instances=instances), encoding="utf-8")
    _run("a board", "leaderboard", ["board", "new", str(data), str(definition), "--server", address], console)
    token.touch(mode=0o600)
    with token.open("w", encoding="utf-8") as file:
        _run("a token for it", "leaderboard", ["token", "new", str(data), "demo"], console, output=file)
    serve = ["serve", str(data), "--server", address, "--port", "0"]
    console.print(f"\n[bold]the board's service[/bold]\n$ {_shown('leaderboard', serve)}", soft_wrap=True)
    with local_process([str(_command("leaderboard")), *serve], home / "board.log") as board:
        submit = ["submit", str(checkpoint), "--name", SUBMITTED, "--board", board, "--token-file", str(token)]
        _run("submission of the trained policy", "leaderboard", [*submit, "--public", "--watch"], console)
    _run("the board's pages", "leaderboard", ["export", str(data), str(site)], console)
    return site / "boards" / f"{SLUG}.html"


def _standing(data: Path) -> str:
    """Where the policy came to stand on its board, which lies in this folder."""
    from turngym_leaderboard.pages.from_store import BoardSource
    from turngym_leaderboard.store import open_store

    with open_store(data) as store:
        rows = BoardSource(store).board(SLUG).rows
    found = {row.name: row.successes[0] for row in rows}
    policy, random, oracle = (found.get(name) for name in (SUBMITTED, "random", "oracle"))
    if policy is None or random is None or oracle is None:
        return "without a result"
    return standing(policy, random.value, oracle.value)


def standing(policy: "Estimate", random: float, oracle: float) -> str:
    """A success rate with its interval, and where it lies: between random player and oracle, or not."""
    at = f"at {percent(policy.value)} ({policy.low * 100:.1f}–{policy.high * 100:.1f})"
    if random < policy.value < oracle:
        return f"{at} between random {percent(random)} and oracle {percent(oracle)}"
    if policy.value <= random:
        return f"{at} no better than random {percent(random)}, oracle {percent(oracle)}"
    return f"{at} no worse than oracle {percent(oracle)}, random {percent(random)}"


def _last_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run; their names sort by iteration."""
    found = sorted(run.glob("checkpoints/*/config.json"))
    if not found:
        raise DemoFailed(f"the training wrote no checkpoint under {run / 'checkpoints'}")
    return found[-1].parent


@contextmanager
def _server(log: Path, console: Console) -> Generator[str]:
    """A server with sokoban and frozen_lake; gives its address."""
    arguments = ["--env", "sokoban", "--env", "frozen_lake", "--splits", "train,validation,held_out"]
    console.print(
        f"[bold]environment server[/bold]\n$ {_shown('env_server', [*arguments, '--port', '0'])}", soft_wrap=True
    )
    with local_server(arguments, log) as address:
        yield address


def _run(what: str, program: str, arguments: Sequence[str], console: Console, *, output: TextIO | None = None) -> None:
    """Runs one of turngym's commands on this terminal, or into `output`. Raises DemoFailed where it fails."""
    console.print(f"\n[bold]{what}[/bold]\n$ {_shown(program, arguments)}", soft_wrap=True, highlight=False)
    began = time.monotonic()
    done = subprocess.run([str(_command(program)), *arguments], stdout=output, check=False)  # noqa: S603 — our own
    if done.returncode:
        raise DemoFailed(f"{what} failed: `{program}` ended with exit code {done.returncode}; its message is above")
    console.print(f"({time.monotonic() - began:.0f} s)", highlight=False)


def _shown(program: str, arguments: Sequence[str]) -> str:
    """A command as it can be typed, safe from the console's markup."""
    return escape(shlex.join([program, *arguments]))


def _command(name: str) -> Path:
    """A command of this installation, whether or not its folder is on the path."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        raise DemoFailed(f"{path} is missing; install with pip install 'turngym[all]'")
    return path


def _fail(console: Console, message: str) -> NoReturn:
    console.print(f"\ndemo: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


def main() -> None:
    """Runs the demo."""
    # By default SIGTERM ends a process without cleaning up, and the server would go on.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    typer.run(demo)


if __name__ == "__main__":
    main()
