"""How far StarPO-S lifts the demo's warm start, over seeds: `python experiments/demo_seeds.py 1 2 3 4 5`.

Each seed is a run of the demo from its first line, with that seed for the policy's weights, the demonstrations, the
levels and the sampling; all are scored on the same 512 held-out worlds. Writes demo_seeds.json and .txt beside this
script: success before and after, their paired difference with its interval over worlds, and its mean over the seeds
with a t-interval.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean

from stages import half_width

from turngym_leaderboard.record import Record, load


def play(seed: int, folder: Path, threads: int) -> Record:
    """Runs the demo with one seed. Returns its evaluation's record."""
    home = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "turngym_leaderboard.demo", "--folder", str(home)]
    command += ["--set", f"run.seed={seed}", "--set", f"run.threads={threads}"]
    with (folder / f"seed-{seed}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    (record,) = (home / "leaderboard").glob("*/record.json")
    return load(record)


def result(seed: int, record: Record) -> dict[str, object]:
    """What one seed came to, from its record."""
    found: dict[str, object] = {"seed": seed}
    for key, row in (("before", "warm start"), ("after", "after RL")):
        statistics = record.row(row).statistics
        assert statistics is not None
        assert statistics.success is not None
        success = statistics.success
        found[key] = {"success": success.rate, "low": success.low, "high": success.high}
    (gain,) = (c for c in record.comparisons if (c.first, c.second) == ("warm start", "after RL"))
    return {**found, "gain": gain.difference, "low": gain.low, "high": gain.high, "worlds": gain.instances}


def summary(results: list[dict[str, object]]) -> dict[str, float]:
    gains = [float(str(each["gain"])) for each in results]
    half = half_width(gains)
    return {"mean_gain": mean(gains), "low": mean(gains) - half, "high": mean(gains) + half}


def table(results: list[dict[str, object]], of: dict[str, float]) -> str:
    lines = ["seed  warm start  after RL  gain (paired 95 %)"]
    for each in results:
        before, after = (json.loads(json.dumps(each[key]))["success"] for key in ("before", "after"))
        interval = f"{each['low']:+.3f} to {each['high']:+.3f}"
        lines.append(f"{each['seed']:>4}  {before:>10.1%}  {after:>8.1%}  {each['gain']:+.3f} ({interval})")
    lines.append(f"mean gain {of['mean_gain']:+.3f} (95 % over seeds {of['low']:+.3f} to {of['high']:+.3f})")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: a temporary folder")
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    target = Path(__file__).with_suffix("")
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        pool = stack.enter_context(ThreadPoolExecutor(arguments.jobs))
        runs = {pool.submit(play, seed, folder, arguments.threads): seed for seed in arguments.seeds}
        for run in as_completed(runs):
            record = run.result()
            results = sorted([*results, result(runs[run], record)], key=lambda each: int(str(each["seed"])))
            of = summary(results)
            content = {
                "command": f"python experiments/demo_seeds.py {' '.join(str(seed) for seed in arguments.seeds)}",
                "threads": arguments.threads,
                "code": record.code.model_dump(mode="json"),
                "environment": {"id": record.protocol.environment, "version": record.environment.version},
                "protocol": record.protocol.model_dump(mode="json"),
                "summary": of,
                "seeds": results,
            }
            target.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            target.with_suffix(".txt").write_text(table(results, of), encoding="utf-8")
    print(table(results, of), end="")


if __name__ == "__main__":
    main()
