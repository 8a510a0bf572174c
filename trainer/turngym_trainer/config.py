"""Settings of a run: one frozen tree of sections, each with its defaults and what they mean.

Knows ranges of single values only. How the layers (defaults, preset, file, command line) come together is in
`settings`, which settings exclude each other in `rules`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Charge = Annotated[float, Field(le=0.0, allow_inf_nan=False)]


Schedule = Literal["constant", "linear", "cosine"]


class Section(BaseModel):
    """Base of the tree's nodes: frozen; an unknown key is an error; a string is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunConfig(Section):
    folder: str = Field(default="runs/run", description="Where everything of this run is written.")
    seed: NotNegative = Field(default=0, description="Decides every random draw.")
    iterations: Positive = Field(default=100, description="Iterations in all, those before a resume included.")
    server: tuple[str, ...] = Field(default=("127.0.0.1:50051",), min_length=1, description="Servers' host:port.")
    patience: Rate = Field(
        default=300.0, description="Seconds that a server may be away, or full, before the run is given up."
    )
    device: str = Field(default="cpu", description="cpu, cuda or cuda:N.")
    threads: NotNegative = Field(default=0, description="Torch threads; 0: as many as torch takes by itself.")
    check_memory: bool = Field(default=True, description="Refuse a run that would not fit by its estimate.")
    trajectories_every: NotNegative = Field(default=1, description="Iterations between episode logs; 0: never.")


class EnvironmentConfig(Section):
    id: str = Field(default="sokoban", min_length=1, description="Environment that the server knows.")
    version: str = Field(default="", description="Refuse another version; empty: any, then pinned for resume.")
    options: dict[str, object] = Field(default_factory=dict[str, object], description="The environment's own options.")
    split: Literal["train", "all"] = Field(default="train", description="all: environments that cannot be divided.")
    max_turns: NotNegative = Field(default=0, description="Turns an episode; 0: the environment's default.")
    max_actions: NotNegative = Field(default=0, description="Actions an episode; 0: the environment's default.")
    max_actions_per_turn: NotNegative = Field(default=0, description="Actions a turn; 0: the environment's default.")
    reward_range: Rate = Field(default=1.0, description="Largest absolute return of an episode; scales the critic.")
    reward_scale: Rate = Field(
        default=1.0, description="What its rewards are learnt multiplied by; the trainer's own are added after that."
    )


def _in_tuple(value: object) -> object:
    """One weight may stand without brackets."""
    return (value,) if isinstance(value, int | float) else value


class MixedEnvironment(EnvironmentConfig):
    name: str = Field(default="", pattern=r"^[\w.-]*$", description="What metrics and records call it; empty: its id.")
    weight: Annotated[tuple[Weight, ...], BeforeValidator(_in_tuple)] = Field(
        default=(1.0,), min_length=1, max_length=2, strict=False, description="Share of the groups; two: from and to."
    )


class MixtureConfig(Section):
    environments: tuple[MixedEnvironment, ...] = Field(
        default=(),
        strict=False,
        description="Several environments in one run, each with the settings of `environment`, name and weight.",
    )
    iterations: Positive = Field(default=100, description="Over which weights of two values go from one to the other.")


class PolicyConfig(Section):
    model: str = Field(default="tiny", description="tiny, smollm2, or a folder with config.json and *.safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the policy's forward passes; weights are kept and trained in float32."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Keep each layer's input only and run it again for gradients: a third more time."
    )


class LoraConfig(Section):
    rank: NotNegative = Field(default=0, description="Of the layers trained in place of all weights; 0: no LoRA.")
    alpha: Rate = Field(default=32.0, description="What the layers add is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(default=(), description="Names of linear layers that get one; none: all of them.")


class RolloutConfig(Section):
    groups: Positive = Field(default=8, description="P: level seeds an iteration.")
    group_size: Positive = Field(default=16, description="N: episodes of each level seed.")
    refills: NotNegative = Field(
        default=0, description="Most times an iteration that other levels are played for groups that fared alike."
    )
    reuse: Positive = Field(
        default=1, description="k: iterations that learn from the groups of one policy version, which plays k times P."
    )
    temperature: Rate = Field(default=1.0, description="Of sampling; the update divides its logits by the same.")
    top_p: float = Field(default=1.0, description="Must be 1: the update could not reproduce the probabilities.")
    top_k: int = Field(default=0, description="Must be 0 (off), for the same reason.")
    max_response_tokens: Positive = Field(default=64, description="Tokens a turn; a cut-off answer is unparsed.")
    context_turns: NotNegative = Field(default=0, description="Last turns that the policy reads; 0: all of them.")
    instructions: Literal["environment", "short", "none"] = Field(
        default="environment", description="What a prompt says first; short: only how to answer."
    )
    prefill: str = Field(default="<think>", description="Begins every answer; prompt, not action.")
    stop_unreadable: bool = Field(
        default=True, description="Stop a run none of whose answers can be parsed before its first update."
    )
    parts: Positive = Field(default=1, description="Parts of fixed membership; one decodes while others step.")
    keep_cache: bool = Field(
        default=True,
        description="Run only a turn's new tokens (context_turns=0); false saves memory where there are several parts.",
    )


class RewardConfig(Section):
    invalid_turn: Charge = Field(
        default=-0.1, description="Added once to a turn that was unparsed or held an invalid action."
    )
    length_floor: NotNegative = Field(default=0, description="Least tokens that a turn should reason; 0: no floor.")
    below_floor: Charge = Field(default=-0.1, description="Added to a parsed turn whose reasoning is shorter.")
    process: str = Field(
        default="", description="package.module:function of a finished turn, whose value is added; empty: none."
    )
    process_weight: float = Field(default=1.0, allow_inf_nan=False, description="That it is added with.")


class FilterConfig(Section):
    kind: str = Field(
        default="std",
        description="std: the groups whose returns spread most; top_p: the fewest with most of the spread; "
        "random: as many as std at random; none: all.",
    )
    keep: float = Field(
        default=0.25, gt=0.0, le=1.0, description="rho: share of groups that std and random keep in each environment."
    )
    top_p: float = Field(default=0.9, gt=0.0, le=1.0, description="Share of the spread that top_p keeps.")
    on: Literal["reward", "task"] = Field(default="reward", description="task leaves shaping out of the spread.")


class AdvantageConfig(Section):
    kind: str = Field(
        default="gae",
        description="gae or bi_level_gae (with a critic), grpo, dr_grpo, rloo or reinforce_pp (without).",
    )
    gamma: Share = Field(
        default=1.0, description="Discount from token to token; grpo, dr_grpo and rloo have none: they compare returns."
    )
    gamma_turn: Share = Field(
        default=1.0, description="Of gae and bi_level_gae: discount at a turn's last token; the latter's is 0.95."
    )
    lam: Share = Field(default=1.0, description="GAE's lambda.")
    bootstrap_truncated: bool = Field(
        default=False,
        description="Where a limit ended the episode, the critic's value of what would have been read next goes on.",
    )
    baseline: Literal["none", "group"] = Field(
        default="none", description="group: reinforce_pp takes off the mean return of the episode's group."
    )


class CriticConfig(Section):
    trunk: Literal["own", "shared"] = Field(default="own", description="own: a copy of the starting policy's.")
    learning_rate: Rate = Field(default=1e-3, description="Pretrained models: 1e-5.")
    coefficient: Rate = Field(default=1.0, description="Weight of the critic's loss where the trunk is shared.")
    clip: Weight = Field(
        default=0.0, description="How far from its old value a value still learns, in reward ranges; 0: no bound."
    )
    warmup_iterations: NotNegative = Field(default=5, description="First iterations that train the critic only.")
    on: Literal["kept", "all"] = Field(default="kept", description="Episodes it learns from; all, if none is kept.")


class KlConfig(Section):
    coefficient: Weight = Field(default=0.0, description="beta; 0: no reference policy is held.")
    place: Literal["reward", "loss"] = Field(default="reward", description="Where the penalty enters.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k1", description="k1 in the reward, k2 or k3 in the loss.")
    allow_k1_in_loss: bool = Field(
        default=False, description="RAGEN's own recipe has k1 in the loss, whose gradient is 0 in expectation."
    )


class UpdateConfig(Section):
    learning_rate: Rate = Field(default=1e-4, description="The actor's. Pretrained models: 1e-6.")
    schedule: Schedule = Field(default="constant", description="linear, cosine: as if to 0 after the last iteration.")
    warmup_iterations: NotNegative = Field(default=0, description="First iterations, over which the rates rise.")
    weight_decay: Weight = Field(default=0.0, description="AdamW's, actor and critic.")
    epochs: Positive = Field(default=1, description="Passes over the same batch.")
    minibatch_episodes: Positive = Field(default=32, description="Most episodes of one optimiser step.")
    microbatch_tokens: Positive = Field(default=16_384, description="Padded tokens of one forward and backward pass.")
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="sequence: of whole episodes (GSPO), with clips of about 3e-4; one pass more."
    )
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0, description="epsilon below 1.")
    clip_high: Rate = Field(default=0.28, description="epsilon above 1.")
    dual_clip: float = Field(default=3.0, description="Bound on the ratio where the advantage is negative; over 1.")
    entropy: Weight = Field(default=0.001, description="Weight of the entropy bonus.")
    aggregation: Literal["token-mean", "seq-mean", "length-limit"] = Field(
        default="token-mean",
        description="Over the mini-batch. length-limit: sum over episodes times turns times tokens a turn; dr_grpo's.",
    )
    gradient_clip: Rate = Field(default=1.0, description="Norm that gradients are cut to.")
    old_logprobs: Literal["sampled", "recomputed"] = Field(
        default="sampled", description="recomputed: once an iteration by the trainer; needed unless float32."
    )


class HorizonConfig(Section):
    turns: tuple[Positive, ...] = Field(
        default=(), description="Turns an episode may have, phase by phase (ScalingInter-RL); none: environment's."
    )
    until: Literal["iterations", "validation"] = Field(
        default="iterations", description="What ends a phase; validation: that its success rises no more."
    )
    iterations: Positive = Field(default=100, description="Of each phase but the last.")
    patience: Positive = Field(default=3, description="Validations in a row without a rise that end a phase.")


class DiagnosticsConfig(Section):
    every: NotNegative = Field(default=0, description="Iterations between looks for template collapse; 0: never.")
    prompts: int = Field(default=8, ge=2, description="First prompts that reasoning is scored under.")
    samples: Positive = Field(default=8, description="Most answers to each of them.")


class ValidationConfig(Section):
    every: NotNegative = Field(default=10, description="Iterations between validations; 0: never.")
    episodes: Positive = Field(default=128, description="Distinct worlds (draws where the split is all).")
    split: Literal["validation", "all"] = Field(default="validation", description="Never held_out: that is for scores.")
    greedy: bool = Field(default=False, description="Most likely tokens; else at the rollout's temperature.")


class GuardConfig(Section):
    on_alarm: Literal["warn", "stop", "rollback"] = Field(
        default="warn", description="What an alarm leads to; rollback: to the newest checkpoint before its cause."
    )
    rollbacks: NotNegative = Field(default=3, description="Most rollbacks of a run; the next alarm stops it.")
    rate_factor: float = Field(default=0.5, gt=0.0, le=1.0, description="Learning rates after each rollback.")


class CheckpointConfig(Section):
    every: Positive = Field(default=10, description="Iterations between checkpoints; the last always has one.")
    keep: Positive = Field(default=3, description="Newest checkpoints that are kept.")


class WarmStartConfig(Section):
    episodes: NotNegative = Field(default=2_000, description="Oracle episodes that are demonstrated; 0: none.")
    demonstrations: tuple[str, ...] = Field(
        default=(),
        description="Files of kept episodes, learnt beside the oracle's: trajectories.jsonl, or of a person.",
    )
    only_solved: bool = Field(default=True, description="Of kept episodes, leave out those that failed.")
    learn_advised: bool = Field(
        default=True, description="Of kept episodes, learn turns played after the oracle was asked; false: read them."
    )
    detours: Share = Field(default=0.5, description="Share of turns that play random actions, which are not learnt.")
    slips: Share = Field(
        default=0.0, description="Share of turns that play random actions and are learnt: what rewards can put right."
    )
    explain: bool = Field(default=True, description="Put the explanation, or kept reasoning, between the think tags.")
    learning_rate: Rate = Field(default=2e-3, description="Of AdamW. Pretrained models: 1e-5.")
    schedule: Schedule = Field(default="constant", description="linear, cosine: as if to 0 after max_steps.")
    batch_rows: Positive = Field(default=64, description="Rows of one optimiser step.")
    max_steps: Positive = Field(default=2_000, description="Optimiser steps at most.")
    target_success: Share = Field(default=0.45, description="Stops once sampled success reaches this.")
    check_every: Positive = Field(default=100, description="Optimiser steps between measurements of success.")
    check_episodes: Positive = Field(default=128, description="Sampled episodes of one measurement.")


class Config(Section):
    """Everything that decides a run, but the servers' behaviour and the machine."""

    run: RunConfig = RunConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    mixture: MixtureConfig = MixtureConfig()
    policy: PolicyConfig = PolicyConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    filter: FilterConfig = FilterConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    kl: KlConfig = KlConfig()
    update: UpdateConfig = UpdateConfig()
    horizon: HorizonConfig = HorizonConfig()
    validation: ValidationConfig = ValidationConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
