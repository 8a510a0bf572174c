"""From a person's play in the playground to a policy that has learnt from it."""

import json

from playing import post, solve

from turngym_trainer.settings import load_config
from turngym_trainer.warm_start import warm_start


def test_what_a_person_keeps_is_learnt_by_a_warm_start(ground, played_server, tmp_path):
    for level in (11, 12):
        page = ground.begin("sokoban", level_seed=str(level))
        post(ground, solve(ground, page, played_server, level), "keep")
    levels = {"11", "12"}
    lines = [line for line in ground.lines() if line["level_seed"] in levels]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = load_config(
        settings=[
            f"run.server={played_server}",
            f"run.folder={tmp_path / 'warm'}",
            "rollout.context_turns=1",
            "warm_start.episodes=0",
            f"warm_start.demonstrations={file}",
            "rollout.instructions=none",
            "rollout.max_response_tokens=24",
            "environment.max_turns=2",
            "warm_start.max_steps=6",
            "warm_start.check_every=3",
            "warm_start.check_episodes=1",
            "warm_start.batch_rows=2",
        ]
    )
    told = []
    result = warm_start(config, tell=told.append)
    assert told == [f"{file}: 2 of 2 episodes are learnt"]
    assert result.rows == sum(len(line["turns"]) for line in lines)
    assert result.checks[1].loss < result.checks[0].loss
