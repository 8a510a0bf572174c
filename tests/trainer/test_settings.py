"""Where settings come from, and what is refused."""

import pytest

from turngym_trainer.config import Config
from turngym_trainer.settings import (
    PRESETS,
    ConfigError,
    changed_keys,
    config_from_tree,
    config_tree,
    load_config,
    settings_table,
    to_toml,
)


def test_layers_later_ones_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('preset = "starpo"\n[update]\nclip_high = 0.25\n[rollout]\ngroups = 4\n', encoding="utf-8")
    config = load_config(file=file, settings=["rollout.groups=2", "environment.options.size = 8", "run.folder=runs/x"])
    assert config.filter.kind == "none"
    assert config.update.clip_high == 0.25
    assert config.update.clip_low == 0.2
    assert config.rollout.groups == 2
    assert config.environment.options == {"size": 8}
    assert config.run.folder == "runs/x"
    assert load_config(file=file, preset="starpo_s").filter.kind == "std"


def test_options_merge_key_by_key():
    config = load_config(settings=["environment.options.size=8", "environment.options.boxes=2"])
    assert config.environment.options == {"size": 8, "boxes": 2}


@pytest.mark.parametrize("preset", PRESETS)
def test_saved_settings_read_back_the_same(preset, tmp_path):
    config = load_config(preset=preset, settings=["environment.options.symbols=['#', '√']", "run.server=h:1"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file=file) == config
    assert config_from_tree(config_tree(config)) == config
    assert config.run.server == ("h:1",)


def test_presets_differ_in_what_the_papers_differ_in():
    starpo, starpo_s, grpo = (load_config(preset=name) for name in ("starpo", "starpo_s", "grpo"))
    assert (starpo.filter.kind, starpo_s.filter.kind, grpo.filter.kind) == ("none", "std", "none")
    assert (starpo.update.clip_high, starpo_s.update.clip_high) == (0.2, 0.28)
    assert (starpo.kl.coefficient, starpo_s.kl.coefficient) == (0.001, 0.0)
    assert grpo.advantage.kind == "grpo"


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (["horizon.turns=[3, 2]"], ["horizon.turns: [3, 2] does not grow from phase to phase", "ascending"]),
        (["horizon.turns=[2, 2]"], ["horizon.turns: [2, 2] does not grow"]),
        (["horizon.turns=[2, 3]", "horizon.until=validation", "validation.every=0"], ["no phase would end"]),
        (
            ["horizon.turns=[10, 20, 30]"],
            ["horizon.iterations: the last of 3 phases would begin after iteration 200", "ends with 100"],
        ),
        (
            ["horizon.turns=[2, 3, 4]", "horizon.iterations=2", "run.iterations=4"],
            ["would begin after iteration 4", "set run.iterations over the former"],
        ),
        (
            # Two phases of a validation that sets the best and three that are no better, every 10 iterations.
            ["horizon.turns=[2, 3, 4]", "horizon.until=validation", "run.iterations=80"],
            ["horizon.patience: the last of 3 phases would begin after iteration 80", "ends with 80"],
        ),
        (["diagnostics.every=5", "rollout.groups=1", "rollout.group_size=32"], ["diagnostics.every", "at least 2"]),
        (["warm_start.detours=0.7", "warm_start.slips=0.4"], ["warm_start.detours: 0.7", "0.4 slips", "at most 1"]),
        (["warm_start.detours=1.0"], ["warm_start.detours: 1 of the turns", "nothing is learnt"]),
        (["reward.length_floor=64"], ["reward.length_floor", "at most 64 tokens", "set it lower"]),
        (["reward.invalid_turn=-inf"], ["reward.invalid_turn", "finite"]),
        (["update.dual_clip=nan"], ["update.dual_clip: nan"]),
        (["rollout.temperature=0"], ["rollout.temperature", "greater than 0, got 0 (Of sampling; "]),
        (["update.warmup_iterations=100"], ["update.warmup_iterations: 100 of 100 iterations would never reach"]),
        (["guard.on_alarm=rollback", "validation.every=20"], ["checkpoint.keep: a fall of success", "at least 8"]),
        (["rollout.group=3"], ["unknown setting 'rollout.group'", "did you mean 'rollout.groups'"]),
        (["rolout.groups=3"], ["unknown setting 'rolout'", "did you mean 'rollout'"]),
        (["update.temperature=1"], ["unknown setting 'update.temperature'", "'rollout.temperature'"]),
        (["rollout.nope=1"], ["unknown setting 'rollout.nope'; `trainer settings` lists them all"]),
        (["rollout.max_response_token=1"], ["did you mean 'rollout.max_response_tokens'"]),
        (["rollout.groups=0"], ["rollout.groups", "greater than or equal to 1", "got 0"]),
        (["rollout.groups=many"], ["rollout.groups", "integer", "'many'"]),
        (["rollout.groups='8'"], ["rollout.groups", "'8'"]),
        (["rollout.temperature=nan"], ["rollout.temperature"]),
        (["filter.keep=0"], ["filter.keep", "greater than 0"]),
        (["reward.invalid_turn=0.1"], ["reward.invalid_turn", "less than or equal to 0"]),
        (["filter.kind=sdt"], ["'sdt'", "did you mean 'std'", "none, std"]),
        (["filter.top_p=0.0"], ["filter.top_p", "greater than 0"]),
        (["filter.top_p=1.5"], ["filter.top_p", "less than or equal to 1"]),
        (["advantage.kind=gea"], ["'gea'", "did you mean 'gae'"]),
        (["rollout.top_p=0.9"], ["top_p=0.9", "use top_p=1.0"]),
        (["rollout.top_k=50"], ["top_k=50", "top_k=0"]),
        (["rollout.group_size=1"], ["rollout.group_size", "no spread", "at least 2"]),
        (["rollout.group_size=1", "filter.kind=none", "advantage.kind=grpo"], ["rollout.group_size"]),
        (["rollout.group_size=1", "filter.kind=none", "advantage.kind=rloo"], ["rollout.group_size", "rloo"]),
        (
            ["rollout.group_size=1", "filter.kind=none", "advantage.kind=dr_grpo", "update.aggregation=length-limit"],
            ["rollout.group_size", "dr_grpo", "at least 2"],
        ),
        (
            ["rollout.group_size=1", "filter.kind=none", "advantage.kind=reinforce_pp", "advantage.baseline=group"],
            ["rollout.group_size", "reinforce_pp", "at least 2"],
        ),
        (
            ["rollout.group_size=1", "rollout.groups=32", "filter.kind=none", "rollout.refills=1"],
            ["rollout.refills", "rollout.group_size to 2"],
        ),
        (["advantage.kind=rloo", "advantage.bootstrap_truncated=true"], ["rloo has no critic", "advantage.kind=gae"]),
        (["advantage.baseline=group"], ["gae has a baseline of its own", "advantage.baseline=none"]),
        (["advantage.kind=dr_grpo"], ["token-mean", "update.aggregation=length-limit"]),
        (
            ["rollout.groups=3", "rollout.group_size=4", "update.minibatch_episodes=13"],
            ["update.minibatch_episodes: 13", "12 episodes", "at most 12"],
        ),
        (["kl.coefficient=1", "kl.place=loss"], ["k1 in the loss", "kl.estimator=k2 or k3", "allow_k1_in_loss"]),
        (["kl.coefficient=1", "kl.estimator=k3"], ["k3 in the reward", "kl.estimator=k1"]),
        (["kl.coefficient=1", "advantage.kind=rloo"], ["never sees a penalty on tokens", "kl.place=loss"]),
        (["kl.coefficient=1", "advantage.kind=grpo"], ["never sees a penalty on tokens", "kl.place=loss"]),
        (["policy.dtype=bfloat16"], ["update.old_logprobs", "recomputed"]),
        (["update.dual_clip=1.2"], ["update.dual_clip", "over 1 + clip_high"]),
        (["validation.split=held_out"], ["validation.split", "held_out"]),
        (["validation.split=all"], ["validation.split", "measure memory"]),
        (["environment.split=all"], ["validation.split", "has met the worlds of validation"]),
        (["rollout.groups"], ["expected section.key=value"]),
        (["=3"], ["expected section.key=value"]),
        (["rollout=3"], ["rollout:"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else None,
)
def test_bad_settings_are_refused_with_reason_and_fix(settings, messages):
    with pytest.raises(ConfigError) as error:
        load_config(settings=settings)
    for message in messages:
        assert message in str(error.value)


def test_a_group_of_one_will_do_where_no_members_are_compared():
    for kind in ("gae", "bi_level_gae", "reinforce_pp"):
        load_config(
            settings=["rollout.group_size=1", "rollout.groups=32", "filter.kind=none", f"advantage.kind={kind}"]
        )


def test_the_last_phase_may_have_but_one_iteration():
    load_config(settings=["horizon.turns=[2, 3, 4]", "horizon.iterations=2", "run.iterations=6"])
    load_config(settings=["horizon.turns=[2, 3, 4]", "horizon.until=validation", "run.iterations=81"])


def test_reinforce_pp_reads_a_penalty_in_the_reward():
    settings = ["kl.coefficient=0.1", "kl.place=reward", "advantage.kind=reinforce_pp"]
    assert load_config(settings=settings).kl.place == "reward"


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(settings=["rollout.groups=0", "update.epoch=2"])
    assert "rollout.groups" in str(error.value)
    assert "update.epoch" in str(error.value)


def test_faults_of_files_and_presets(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read"):
        load_config(file=tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[rollout\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml: is not TOML"):
        load_config(file=broken)
    broken.write_text("preset = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="preset must be a name, got 3"):
        load_config(file=broken)
    with pytest.raises(ConfigError, match=r"'starpos'; did you mean 'starpo"):
        load_config(preset="starpos")


def test_every_setting_is_described():
    rows = list(settings_table())
    assert ("rollout.groups", "8", "P: level seeds an iteration.") in rows
    assert all(description for _, _, description in rows)
    assert {key.split(".")[0] for key, _, _ in rows} == set(Config.model_fields)


def test_changed_keys():
    old, new = load_config(), load_config(settings=["run.iterations=7", "update.epochs=2"])
    assert changed_keys(old, new) == ["run.iterations", "update.epochs"]
