"""The command `trainer`: warm-start, train, eval, report, compare, sweep, settings.

Every setting is `--set section.key=value`.
"""

import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from turngym.command import run_command
from turngym_client import Split, TurngymError
from turngym_trainer.checkpoint import TRAINING, CheckpointError, read_state
from turngym_trainer.compare import HEADINGS, compare, write_comparison
from turngym_trainer.demonstrations import DemonstrationError
from turngym_trainer.distributed import LostPeerError, PeerError, is_first_process
from turngym_trainer.evaluate import Evaluation, EvaluationError, choose_levels, evaluate, pooled
from turngym_trainer.grade import RunError
from turngym_trainer.metrics import Number
from turngym_trainer.mixture import environments
from turngym_trainer.policy import PolicyError, load_policy
from turngym_trainer.recorded import RecordError, read_run
from turngym_trainer.report import write_report
from turngym_trainer.settings import PRESETS, ConfigError, load_config, settings_table
from turngym_trainer.start import connected, served_environment
from turngym_trainer.sweep import SweepError, read_sweep
from turngym_trainer.sweep_page import HEADINGS as SWEEP_HEADINGS
from turngym_trainer.sweep_page import results, rows, write_sweep_page
from turngym_trainer.sweep_runs import check, run_sweep
from turngym_trainer.train import resumable, train
from turngym_trainer.warm_start import REPORT, Check, WarmStartError, resumable_warm_start, warm_start

app = typer.Typer(no_args_is_help=True, add_completion=False, help="StarPO-S training of LLM agents.")
console = Console()

REFUSALS: Final = (ConfigError, PolicyError, CheckpointError, TurngymError, OSError)
"""What commands that play or train may fail with by no fault of their own; told in a line."""

PresetOption = Annotated[str | None, typer.Option("--preset", help=f"Set of values: {', '.join(PRESETS)}.")]
FileOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; see `trainer settings`. Wins over the file.")
]
ResumeOption = Annotated[Path | None, typer.Option("--resume", help="Folder of a run to go on with.")]


@app.command("train")
def train_command(
    preset: PresetOption = None, config: FileOption = None, set_: SetOption = None, resume: ResumeOption = None
) -> None:
    """Trains a policy against a running environment server. In several processes under `torchrun`."""
    if not is_first_process():
        console.quiet = True
        logging.getLogger("turngym_trainer").setLevel(logging.ERROR)
    _check_resume(resume, preset, config)
    folder, went_on = Path(), False
    try:
        settings = (
            resumable(resume, set_ or []) if resume else load_config(preset=preset, file=config, settings=set_ or [])
        )
        folder = Path(settings.run.folder)
        with _progress() as progress:
            bar = progress.add_task("train", total=settings.run.iterations, now="")

            def observe(metrics: Mapping[str, Number]) -> None:
                nonlocal went_on
                went_on = True
                iteration, now = int(metrics["iteration"] or 0), _now(metrics)
                progress.update(bar, completed=iteration, now=now)
                if not console.is_terminal and "validation/success" in metrics:
                    console.print(f"iteration {iteration} of {settings.run.iterations}: {now}", highlight=False)

            try:
                last = train(
                    settings,
                    resume=resume is not None,
                    observe=observe,
                    tell=lambda line: progress.console.print(line, highlight=False, markup=False, soft_wrap=True),
                )
            finally:
                if went_on:
                    _report(folder)
    except PeerError as error:  # The other one has said it.
        raise typer.Exit(2) from error
    except (LostPeerError, EvaluationError, RunError, *REFUSALS) as error:
        _fail(f"{error}\ngo on with: trainer train --resume {folder}" if went_on else str(error))
    console.print(f"Last checkpoint: {last}\nMetrics: {folder / 'metrics.jsonl'}", highlight=False)


@app.command("warm-start")
def warm_start_command(
    preset: PresetOption = None, config: FileOption = None, set_: SetOption = None, resume: ResumeOption = None
) -> None:
    """Teaches a policy the oracle's play or kept episodes, so that rewards have something to go by.

    Writes it to run.folder.
    """
    _check_resume(resume, preset, config)
    folder, went_on = Path(), False
    try:
        settings = (
            resumable_warm_start(resume, set_ or [])
            if resume
            else load_config(preset=preset, file=config, settings=set_ or [])
        )
        folder = Path(settings.run.folder)
        with _progress() as progress:
            bar = progress.add_task("warm start", total=settings.warm_start.max_steps, now="demonstrations")

            def observe(check: Check) -> None:
                nonlocal went_on
                went_on = True
                of_each = "".join(f"  {name} {success:.3f}" for name, success in check.environments.items())
                now = (
                    f"loss {check.loss:.3f}  success {check.success:.3f}{of_each}  "
                    f"valid format {check.valid_format:.3f}"
                )
                progress.update(bar, completed=check.step, now=now)
                if not console.is_terminal:
                    console.print(f"step {check.step}: {now}", highlight=False)

            result = warm_start(
                settings,
                resume=resume is not None,
                observe=observe,
                tell=lambda line: progress.console.print(line, highlight=False, markup=False, soft_wrap=True),
            )
    except (DemonstrationError, EvaluationError, WarmStartError, *REFUSALS) as error:
        _fail(f"{error}\ngo on with: trainer warm-start --resume {folder}" if went_on else str(error))
    ended = "reached" if result.reached else "was not reached"
    target = f"sampled success of {settings.warm_start.target_success:.0%} {ended}"
    console.print(f"Policy: {result.folder} ({target})", highlight=False, soft_wrap=True)


@app.command("eval")
def eval_command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, or any policy folder.")],
    episodes: Annotated[int, typer.Option(min=1, help="Distinct worlds (draws where the split is all).")] = 256,
    greedy: Annotated[bool, typer.Option("--greedy", help="Most likely tokens.")] = False,
    preset: PresetOption = None,
    config: FileOption = None,
    set_: SetOption = None,
) -> None:
    """Plays a policy on validation levels, with the settings of its run where it has one."""
    try:
        settings = load_config(preset=preset, file=config, settings=set_ or [], base=_made_with(checkpoint))
        split = Split(settings.validation.split)
        policy = load_policy(str(checkpoint), device=settings.run.device, dtype=settings.policy.dtype)
        with connected(settings) as client:
            played: dict[str, Evaluation] = {}
            for name, alone in environments(settings).items():
                served_environment(client, alone, {split})
                levels = choose_levels(client, alone.environment, split, run_seed=settings.run.seed, count=episodes)
                played[name] = evaluate(policy, client, alone, levels, split=split, greedy=greedy)
    except (EvaluationError, ValueError, *REFUSALS) as error:
        _fail(str(error))
    table = Table(title=f"{checkpoint} on {', '.join(played)}, split {split.value}")
    mixed = len(played) > 1
    if mixed:
        table.add_column("environment", overflow="fold")
        played["all"] = pooled(list(played.values()))
    for column in ("episodes", "success", "95 % interval", "return", "valid format", "valid action", "lost"):
        table.add_column(column, justify="right", overflow="fold")
    for name, result in played.items():
        table.add_row(
            *([name] if mixed else []),
            str(result.episodes),
            f"{result.success:.1%}",
            f"{result.low:.1%} to {result.high:.1%}",
            f"{result.environment_return:.3f}",
            f"{result.valid_format:.1%}",
            f"{result.valid_action:.1%}",
            str(result.lost),
        )
    console.print(table)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run; it may still be going, or have been killed.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: report.html in the run.")] = None,
) -> None:
    """Writes a run's report: curves, alarms, episodes, settings, in one HTML file."""
    try:
        written = write_report(run, out)
    except (RecordError, OSError) as error:
        _fail(str(error))
    console.print(f"Report: {written}", highlight=False, soft_wrap=True)


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two runs or more; differences are to the first.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with curves here.")] = None,
) -> None:
    """Puts runs beside each other: success, what they used, and the settings that differ."""
    if len(runs) < 2:
        _fail(f"compare needs two runs or more, got only {runs[0]}; for a single run there is `trainer report`")
    try:
        read = [read_run(folder) for folder in runs]
        compared = compare(read)
        written = write_comparison(read, compared, html) if html else None
    except (RecordError, OSError) as error:
        _fail(str(error))
    console.print(_text_table(HEADINGS, compared.rows, words=1))
    for note in compared.notes:
        console.print(Text(note))
    if compared.settings:
        console.print(_text_table(("setting", *compared.names), compared.settings, words=len(runs) + 1))
    else:
        console.print("No setting differs.")
    if written:
        console.print(f"Page: {written}", highlight=False, soft_wrap=True)


@app.command("sweep")
def sweep_command(
    file: Annotated[Path, typer.Argument(help="TOML file: folder, seeds, settings, variants, grid; see the README.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; mind run.threads.")] = 1,
    set_: SetOption = None,
) -> None:
    """Trains with several settings over several seeds; called again, it goes on with what is left."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sweep = read_sweep(file, set_ or [])
        check(sweep)
        failures = run_sweep(sweep, jobs, lambda line: console.print(line, markup=False, highlight=False))
        found = results(sweep)
        written = write_sweep_page(sweep, found)
    except (SweepError, ConfigError, RecordError, TurngymError, OSError) as error:
        _fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, previous)
    console.print(_text_table(SWEEP_HEADINGS, rows(found), words=1))
    console.print(f"Page: {written}", highlight=False, soft_wrap=True)
    if failures:
        _fail("\n".join([f"{len(failures)} runs failed; mend that and call this again:", *map(str, failures)]))


@app.command("settings")
def settings_command() -> None:
    """Lists every setting with its default."""
    rows = list(settings_table())
    longest = max(len(key) for key, _, _ in rows)
    if not console.is_terminal:
        for key, default, meaning in rows:
            typer.echo(f"{key:<{longest}}  {default or '-'}  {meaning}")
        return
    table = Table()
    # Names are copied from here: they stay whole while there is room for anything beside them.
    table.add_column("setting", overflow="fold", no_wrap=console.width >= longest + 30)
    table.add_column("default", overflow="fold")
    table.add_column("meaning", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def main() -> None:
    """Entry point of the command `trainer`."""
    disable_progress_bar()  # transformers draws bars of its own, through ours.
    run_command(app, "trainer")


def _check_resume(resume: Path | None, preset: str | None, config: Path | None) -> None:
    if resume is not None and (preset or config):
        _fail("--resume takes its settings from the run's folder; only --set may go with it")


def _made_with(policy: Path) -> dict[str, object] | None:
    """Settings that a policy was made with, where its folder tells them."""
    if (policy / TRAINING).is_dir():
        return read_state(policy).config
    report = policy / REPORT
    return json.loads(report.read_text(encoding="utf-8"))["config"] if report.exists() else None


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[now]}"),
        console=console,
    )


def _report(folder: Path) -> None:
    """Writes the report of a run that has ended, however it did. Without it the run is none the worse."""
    try:
        console.print(f"Report: {write_report(folder)}", highlight=False)
    except (RecordError, OSError) as error:
        message = f"trainer: the report of this run could not be written: {error}; see `trainer report`"
        Console(stderr=True).print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> Table:
    """A table for a terminal; the first `words` columns hold words, the others numbers."""
    drawn = Table()
    for at, heading in enumerate(headings):
        drawn.add_column(Text(heading), justify="left" if at < words else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _now(metrics: Mapping[str, Number]) -> str:
    """The few numbers that a progress bar has room for."""
    shown = {"reward": "average/train/reward", "success": "average/train/success", "validation": "validation/success"}
    return "  ".join(f"{name} {value:.3f}" for name, key in shown.items() if (value := metrics.get(key)) is not None)


def _fail(message: str) -> NoReturn:
    """Prints what is wrong and exits with status 2."""
    Console(stderr=True).print(f"trainer: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
