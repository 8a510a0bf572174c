"""100,000 instances for a `train` token, over every environment: none is of a held-out world.

A real server of every environment, all splits served, with a token file. The `train` token asks for every seed in all
four splits and must be refused `held_out` and, where worlds are divided, `all`; the split of what it is given is worked
out here from the world's id (environment.proto says how), not from what the server says. The `evaluate` token's
`held_out` instances show that the check can fail. Where nothing divides (a bandit with one pair of names), `all` is
given and nothing is held out.

    python experiments/access_matrix.py

Prints a table; writes it beside this file as .txt, and as .json with what made it. Exit status 1 on a leak.
"""

import argparse
import asyncio
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_server.access import new_token
from turngym_server.config import ServerConfig
from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY
from turngym_server.host import EnvironmentHost
from turngym_server.server import Server
from turngym_server.splits import Split

HERE: Final = Path(__file__).parent
BATCH: Final = 512
HELD_OUT_SAMPLE: Final = 500
CASES: Final = (
    ("bandit", "{}"),
    ("bandit", '{"names": "pairs"}'),
    ("bandit_reversed", '{"names": "pairs"}'),
    ("frozen_lake", "{}"),
    ("sokoban", "{}"),
    ("sokoban_large", "{}"),
)


def is_held_out(world_id: str) -> bool:
    """By the first 8 bytes of the world's digest, which its id begins with."""
    return int(world_id[:16], 16) % 10 == 9


async def reset(stub: Any, token: str, case: tuple[str, str], split: Split, seeds: range) -> tuple[Counter[str], int]:
    """What became of resets: counts of "held out", "other" and reasons of refusal; and how many are divided."""
    items = [
        pb.ResetItem(
            request_id=secrets.token_bytes(16),
            environment_id=case[0],
            options_json=case[1],
            split=pb.Split.Value(f"SPLIT_{split.value.upper()}"),
            level_seed=seed,
        )
        for seed in seeds
    ]
    request = pb.ResetRequest(items=items, max_wait_seconds=60)
    metadata = (("authorization", f"Bearer {token}"),)
    outcomes = (await stub.Reset(request, metadata=metadata)).outcomes
    while any(outcome.HasField("pending") for outcome in outcomes):
        outcomes = (await stub.Reset(request, metadata=metadata)).outcomes
    started = [outcome.started for outcome in outcomes if outcome.HasField("started")]
    if started:
        await stub.Close(pb.CloseRequest(session_ids=[each.session_id for each in started]), metadata=metadata)
    found = Counter("held out" if is_held_out(each.world_id) else "other" for each in started)
    refused = sum(outcome.HasField("error") and outcome.error.code == 7 for outcome in outcomes)
    assert len(started) + refused == len(seeds), outcomes
    found["refused"] = refused
    return found, len(started)


def make_tokens(file: Path) -> dict[str, str]:
    """A token of each role, made as an operator does."""
    tokens: dict[str, str] = {}
    for role in ("train", "evaluate"):
        command = [sys.executable, "-m", new_token.__name__, role, "--role", role, "--file", str(file)]
        tokens[role] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return tokens


async def measure(file: Path, tokens: dict[str, str], total: int) -> list[dict[str, object]]:
    hosts = [EnvironmentHost(REGISTRY[name]) for name in dict.fromkeys(name for name, _ in CASES)]
    rows = []
    config = ServerConfig(splits=frozenset(Split), tokens=file)
    async with (
        Server(hosts, config) as server,
        grpc.aio.insecure_channel(server.address, options=(("grpc.max_receive_message_length", 64 << 20),)) as channel,
    ):
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for case in CASES:
            given: Counter[str] = Counter()
            seed = 0
            while given["held out"] + given["other"] < total / len(CASES):
                for split in Split:
                    found, _ = await reset(stub, tokens["train"], case, split, range(seed, seed + BATCH))
                    given.update({f"{split.value} refused": found.pop("refused")})
                    given += found
                seed += BATCH
            control, _ = await reset(stub, tokens["evaluate"], case, Split.HELD_OUT, range(HELD_OUT_SAMPLE))
            rows.append({"environment": case[0], "options": case[1], "train": dict(given), "evaluate": dict(control)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resets", type=int, default=100_000, help="Instances given to the train token.")
    arguments = parser.parse_args()
    load_own()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.toml"
        rows: list[Any] = asyncio.run(measure(file, make_tokens(file), arguments.resets))
    assert {row["environment"] for row in rows} == set(REGISTRY), "add the new environment to CASES"
    lines = ["environment        options               given to train   held out   refused   evaluate: held out"]
    for row in rows:
        train = row["train"]
        given = train.get("held out", 0) + train.get("other", 0)
        refused = sum(count for name, count in train.items() if name.endswith("refused"))
        lines.append(
            f"{row['environment']:18} {row['options']:21} {given:14,}   {train.get('held out', 0):8}  {refused:8,}"
            f"   {row['evaluate'].get('held out', 0):3} of {HELD_OUT_SAMPLE - row['evaluate'].get('refused', 0)}"
        )
    table = "\n".join(lines)
    print(table)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    made_by = {
        "command": " ".join(["python", os.path.relpath(__file__), *sys.argv[1:]]),
        "commit": commit,
        "turngym": turngym.__version__,
        "python": platform.python_version(),
        "environments": {name: spec.version for name, spec in sorted(REGISTRY.items())},
    }
    result = {"made_by": made_by, "rows": rows}
    (HERE / "access_matrix.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (HERE / "access_matrix.txt").write_text(table + "\n", encoding="utf-8")
    leaks = sum(row["train"].get("held out", 0) for row in rows)
    raise SystemExit(leaks > 0)


if __name__ == "__main__":
    main()
