"""Which settings exclude each other, each rule with its reason and what to do.

Only what settings say of themselves: what a server, a policy or a machine has to say is asked for when a run is opened.
Ranges of single values are in `config`.
"""

from collections.abc import Iterator

from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.config import Config, EnvironmentConfig
from turngym_trainer.mixture import environments


def faults(config: Config) -> Iterator[str]:
    """What cannot work of settings whose filter and estimator are known, one line each."""
    yield from _group_faults(config)
    yield from _advantage_faults(config)
    yield from _critic_faults(config)
    yield from _kl_faults(config)
    yield from _probability_faults(config)
    yield from _length_faults(config)
    yield from _reuse_faults(config)
    yield from _horizon_faults(config)
    yield from _guard_faults(config)
    yield from _reward_faults(config)
    yield from _warm_start_faults(config)
    yield from _mixture_faults(config)
    for alone in environments(config).values():
        yield from _split_faults(alone)


def faults_of_processes(config: Config, processes: int) -> Iterator[str]:
    """What several processes cannot do together, one line each."""
    if processes == 1:
        return
    with_critic = ADVANTAGES[config.advantage.kind].needs_critic
    if with_critic and config.critic.trunk == "shared" and not config.lora.rank:
        yield (
            "critic.trunk: of several processes each holds a part of actor and critic, which run apart; set "
            "critic.trunk=own, LoRA (lora.rank=16), or an advantage without critic (advantage.kind=grpo)"
        )
    if config.run.device.startswith("cuda:"):
        yield f"run.device: each of {processes} processes takes a GPU of its own; set run.device=cuda"


def _group_faults(config: Config) -> Iterator[str]:
    rollout = config.rollout
    compares = [
        *([f"{config.filter.kind} filtering"] if config.filter.kind != "none" else []),
        *([config.advantage.kind] if ADVANTAGES[config.advantage.kind].compares_members else []),
        *([f"{config.advantage.kind} with advantage.baseline=group"] if config.advantage.baseline == "group" else []),
    ]
    if rollout.group_size < 2 and rollout.refills:
        yield "rollout.refills: a group of 1 has no spread, so all would be played again; set rollout.group_size to 2"
    if rollout.group_size < 2 and compares:
        yield (
            f"rollout.group_size: a group of 1 has no spread, and its members are compared by {' and '.join(compares)}"
            "; set it to at least 2"
        )
    episodes = rollout.groups * rollout.group_size
    if config.update.minibatch_episodes > episodes:
        yield (
            f"update.minibatch_episodes: {config.update.minibatch_episodes} is more than an iteration's {episodes} "
            f"episodes (rollout.groups times rollout.group_size); set it to at most {episodes}, or play more"
        )
    if config.diagnostics.every and rollout.groups < 2:
        yield (
            "diagnostics.every: reasoning is compared between first prompts, of which one group has one; set it to 0, "
            "or rollout.groups to at least 2"
        )


def _advantage_faults(config: Config) -> Iterator[str]:
    advantage = config.advantage
    if advantage.baseline == "group" and advantage.kind != "reinforce_pp":
        yield (
            f"advantage.baseline: {advantage.kind} has a baseline of its own; set advantage.baseline=none, or "
            "advantage.kind=reinforce_pp"
        )
    if advantage.bootstrap_truncated and not ADVANTAGES[advantage.kind].needs_critic:
        yield (
            f"advantage.bootstrap_truncated: {advantage.kind} has no critic that could say what would have "
            "come; set it to false, or advantage.kind=gae"
        )
    if advantage.kind == "dr_grpo" and config.update.aggregation != "length-limit":
        yield (
            f"update.aggregation: {config.update.aggregation} weighs tokens by how long answers are, which dr_grpo is "
            "there to avoid; set update.aggregation=length-limit, or advantage.kind=rloo"
        )


def _critic_faults(config: Config) -> Iterator[str]:
    critic = config.critic
    if critic.trunk == "shared" and critic.on == "all" and config.filter.kind != "none":
        yield (
            "critic.on: a shared trunk learns policy and value in one step, from the same episodes; "
            "set critic.on=kept or critic.trunk=own"
        )
    if config.lora.rank and critic.trunk == "own" and ADVANTAGES[config.advantage.kind].needs_critic:
        yield (
            "critic.trunk: a trunk of its own is trained whole, and LoRA is there to train few weights; set "
            "critic.trunk=shared, or an advantage without critic (advantage.kind=grpo)"
        )


def _kl_faults(config: Config) -> Iterator[str]:
    if config.kl.coefficient == 0.0:
        return
    place, estimator = config.kl.place, config.kl.estimator
    if place == "loss" and estimator == "k1" and not config.kl.allow_k1_in_loss:
        yield (
            "kl.estimator: k1 in the loss has no gradient in expectation, so it would penalise nothing; "
            "set kl.estimator=k2 or k3, or kl.place=reward (kl.allow_k1_in_loss=true has it nevertheless, as RAGEN's "
            "own recipe does)"
        )
    if place == "reward" and not ADVANTAGES[config.advantage.kind].reads_token_rewards:
        yield (
            f"kl.place: {config.advantage.kind} reads one return an episode and never sees a penalty on tokens; "
            "set kl.place=loss and kl.estimator=k3"
        )
    elif place == "reward" and estimator != "k1":
        yield f"kl.estimator: {estimator} in the reward is biased; set kl.estimator=k1, or kl.place=loss"


def _probability_faults(config: Config) -> Iterator[str]:
    """Rules of what is sampled and of the ratio to it."""
    rollout, update = config.rollout, config.update
    if rollout.top_p != 1.0 or rollout.top_k != 0:
        yield (
            "rollout.top_p and rollout.top_k: log-probabilities are those of the whole distribution, and "
            f"truncated sampling (top_p={rollout.top_p}, top_k={rollout.top_k}) draws from another; "
            "use top_p=1.0 and top_k=0, and shape the distribution by rollout.temperature"
        )
    if config.policy.dtype != "float32" and update.old_logprobs == "sampled":
        yield (
            f"update.old_logprobs: in {config.policy.dtype} the sampler's log-probabilities differ from the trainer's, "
            "and the ratio would start away from 1; set update.old_logprobs=recomputed"
        )
    if not update.dual_clip > 1.0 + update.clip_high:  # Nor is NaN.
        yield (
            f"update.dual_clip: {update.dual_clip} must be over 1 + clip_high = {1 + update.clip_high}, "
            "else it acts before the clip does; 3.0 is usual"
        )


def _length_faults(config: Config) -> Iterator[str]:
    if config.update.warmup_iterations >= config.run.iterations:
        yield (
            f"update.warmup_iterations: {config.update.warmup_iterations} of {config.run.iterations} iterations would "
            "never reach the learning rate; set it under run.iterations"
        )


def _reuse_faults(config: Config) -> Iterator[str]:
    reuse = config.rollout.reuse
    if config.run.iterations % reuse:
        yield (
            f"rollout.reuse: {config.run.iterations} iterations are no multiple of {reuse}, so the last groups would "
            "be played and never learnt from; set "
            f"run.iterations={-(-config.run.iterations // reuse) * reuse}, or another rollout.reuse"
        )
    horizon = config.horizon
    if len(horizon.turns) > 1 and horizon.until == "iterations" and horizon.iterations % reuse:
        yield (
            f"horizon.iterations: a phase of {horizon.iterations} ends while groups of {reuse} iterations "
            f"(rollout.reuse) are in use, which have its turns; set it to a multiple of {reuse}"
        )


def _horizon_faults(config: Config) -> Iterator[str]:
    horizon, turns, iterations = config.horizon, config.horizon.turns, config.run.iterations
    if list(turns) != sorted(set(turns)):
        yield f"horizon.turns: {list(turns)} does not grow from phase to phase; give ascending numbers, as [10, 20, 30]"
    if len(turns) < 2:
        return
    changes = len(turns) - 1
    if horizon.until == "iterations" and changes * horizon.iterations >= iterations:
        yield (
            f"horizon.iterations: the last of {len(turns)} phases would begin after iteration "
            f"{changes * horizon.iterations}, and the run ends with {iterations}; set run.iterations over the former, "
            "or fewer for a phase"
        )
    if horizon.until == "validation" and not config.validation.every:
        yield "horizon.until: without validations no phase would end; set validation.every, or horizon.until=iterations"
    # A phase takes one validation that sets its best, and `patience` that are no better.
    earliest = changes * (horizon.patience + 1) * config.validation.every
    if horizon.until == "validation" and earliest >= iterations:
        yield (
            f"horizon.patience: the last of {len(turns)} phases would begin after iteration {earliest} at the "
            f"earliest, and the run ends with {iterations}; set run.iterations over the former, a smaller "
            "validation.every or horizon.patience"
        )


def _guard_faults(config: Config) -> Iterator[str]:
    reach = config.checkpoint.keep * config.checkpoint.every
    if config.guard.on_alarm == "rollback" and reach < 4 * config.validation.every:
        yield (
            f"checkpoint.keep: a fall of success is told of after three validations, {3 * config.validation.every} "
            f"iterations, and the {config.checkpoint.keep} checkpoints kept reach back {reach}; set it to at least "
            f"{-(-4 * config.validation.every // config.checkpoint.every)}, or guard.on_alarm=warn"
        )


def _reward_faults(config: Config) -> Iterator[str]:
    reward = config.reward
    if not reward.length_floor:
        return
    if reward.below_floor < reward.invalid_turn:
        yield (
            f"reward.below_floor: {reward.below_floor} for short reasoning is worse than an answer that cannot "
            f"be parsed, {reward.invalid_turn}, and would teach those; set it to at least reward.invalid_turn"
        )
    if reward.length_floor >= config.rollout.max_response_tokens:
        yield (
            f"reward.length_floor: an answer of at most {config.rollout.max_response_tokens} tokens "
            f"(rollout.max_response_tokens) cannot reason {reward.length_floor} and act, so every turn would be "
            "charged; set it lower, or let answers be longer"
        )


def _warm_start_faults(config: Config) -> Iterator[str]:
    warm = config.warm_start
    if not warm.episodes and not warm.demonstrations:
        yield "warm_start.episodes: 0 and no warm_start.demonstrations leave nothing to learn from; set one of them"
    if warm.detours + warm.slips > 1.0 or warm.detours == 1.0:
        yield (
            f"warm_start.detours: {warm.detours:g} of the turns are detours and {warm.slips:g} slips "
            "(warm_start.slips); both together are at most 1, and detours, of which nothing is learnt, under 1"
        )


def _mixture_faults(config: Config) -> Iterator[str]:
    mixed = config.mixture.environments
    if not mixed:
        return
    alone, usual = config.environment, EnvironmentConfig()
    if own := [key for key in EnvironmentConfig.model_fields if getattr(alone, key) != getattr(usual, key)]:
        yield (
            f"{', '.join(f'environment.{key}' for key in own)}: a mixture names its environments itself; set it for "
            "each of mixture.environments"
        )
    names = [each.name or each.id for each in mixed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"mixture.environments: {', '.join(twice)} is there more than once; give each a name of its own, for "
            f'example {{id = "{mixed[0].id}", name = "small"}}'
        )
    if any(sum(each.weight[at] for each in mixed) <= 0.0 for at in (0, -1)):
        yield "mixture.environments: the weights sum to 0, so no groups would be played; set one over 0"


def _split_faults(config: Config) -> Iterator[str]:
    if config.environment.split == "train" and config.validation.split == "all" and config.validation.every:
        yield (
            "validation.split: all contains the worlds of split train, so it would measure memory; set "
            "validation.split=validation, or environment.split=all where the environment cannot be divided"
        )
    if config.environment.split == "all" and config.validation.split == "validation" and config.validation.every:
        yield (
            "validation.split: an environment that is trained on split all has met the worlds of validation; "
            "set validation.split=all (a score on worlds that were trained on) or environment.split=train"
        )
