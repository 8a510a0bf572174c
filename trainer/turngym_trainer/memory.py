"""What a run will take of memory, worked out before its first rollout, and which settings would take less.

Bytes throughout. Letters: P parameters; s bytes of a number in the forward pass (4, bfloat16: 2); D layers, H hidden
size, F feed-forward size, Q query heads × head size, C key-value heads × head size, V vocabulary; L tokens of the
longest context. Everything is counted as if all episodes grew to their limits together, so most runs stay under their
estimate. What the process held before (interpreter, libraries) is not counted, nor what an allocator keeps of what was
freed: in small tensors on a CPU that may be half as much again. Knows nothing of what there is; see `room`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, cast

from torch import nn
from transformers import PreTrainedModel

from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.config import Config
from turngym_trainer.logprobs import GROWTH
from turngym_trainer.settings import ConfigError, check_processes, config_tree, load_config

_MASTER: Final = 4
_ADAM: Final = 8
"""Two moments in float32."""
_SCORED_LOGITS: Final = 20
"""Bytes that a logit takes when a loss is taken and gone back through: five float32 of it live at once."""
_SAMPLED_LOGITS: Final = 36
"""Bytes that a logit takes when a token is sampled: three float32 and three float64."""
_LEAST_BUDGET: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model: the letters P, D, H, F, Q, C and V; `trunk`: parameters without those of the output layer."""

    parameters: int
    trunk: int
    layers: int
    hidden: int
    feed_forward: int
    queries: int
    keys: int
    vocabulary: int

    @staticmethod
    def of(model: PreTrainedModel) -> "Shape":
        """Sizes by a model's weights and configuration; what this does not say is as in a plain transformer."""
        config = cast(Any, model.config)
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        head = int(getattr(config, "head_dim", None) or hidden // heads)
        return Shape(
            parameters=_count(model),
            trunk=_count(model.base_model),
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            feed_forward=int(getattr(config, "intermediate_size", None) or 4 * hidden),
            queries=heads * head,
            keys=int(getattr(config, "num_key_value_heads", None) or heads) * head,
            vocabulary=int(config.vocab_size),
        )


@dataclass(frozen=True, slots=True)
class Episode:
    """Tokens of an episode.

    Attributes:
        prompt: of the first turn, everything before the answer.
        turn: that each later turn adds before its answer.
        turns: the most that are played.
        positions: the most that the model reads.
    """

    prompt: int
    turn: int
    turns: int
    positions: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by part; each is explained where it is worked out. Rollout and update do not happen at once."""

    weights: int
    optimiser: int
    reference: int
    critic: int
    cache: int
    sampling: int
    gradients: int
    activations: int
    logits: int

    @property
    def kept(self) -> int:
        """Held throughout the run."""
        return self.weights + self.optimiser + self.reference + self.critic

    @property
    def peak(self) -> int:
        """The most at any time."""
        rollout = self.cache + self.sampling
        update = self.gradients + self.activations + self.logits
        return self.kept + max(rollout, update)

    def line(self) -> str:
        """All parts, in one line."""
        return (
            f"{told(self.peak)} at most: weights {told(self.weights)}, optimiser {told(self.optimiser)}, reference "
            f"{told(self.reference)}, critic {told(self.critic)}; and the larger of rollout (cache {told(self.cache)}, "
            f"sampling {told(self.sampling)}) and update (gradients {told(self.gradients)}, activations "
            f"{told(self.activations)}, logits {told(self.logits)})"
        )


def told(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def estimate(shape: Shape, config: Config, episode: Episode, processes: int = 1) -> Estimate:
    """What a run takes, by part; of several processes, what each of them takes (see `sharded`)."""
    if processes > 1:
        return _shared(shape, config, episode, processes)
    s = _bytes(config)
    rows = _Rows.of(config, episode)
    trained = adapters(shape, config.lora.rank) if config.lora.rank else shape.parameters
    return Estimate(
        weights=held_weights(trained, s) + (shape.parameters * s if config.lora.rank else 0),
        optimiser=_ADAM * trained,
        reference=shape.parameters * s if config.kl.coefficient > 0.0 and not config.lora.rank else 0,
        critic=critic(shape, config),
        cache=cache(shape, s, config, rows.longest),
        sampling=sampling(shape, s, config, episode, rows.longest),
        gradients=held_weights(trained, s),
        activations=activations(shape, s, rows.tokens, rows.width, recomputed=config.policy.gradient_checkpointing),
        logits=_SCORED_LOGITS * shape.vocabulary * rows.actions,
    )


def _shared(shape: Shape, config: Config, episode: Episode, processes: int) -> Estimate:
    """A process's part: of masters, gradients, moments and critic; of episodes. The policy that plays it has whole.

    With LoRA it is of episodes alone: what is trained is little, and every process has all of it.
    """
    rollout, validation = config.rollout, config.validation
    share = config.model_copy(
        update={
            "rollout": rollout.model_copy(update={"groups": -(-rollout.groups // processes)}),
            "validation": validation.model_copy(update={"episodes": -(-validation.episodes // processes)}),
        }
    )
    alone, s = estimate(shape, share, episode), _bytes(config)
    if config.lora.rank:
        return alone
    return replace(
        alone,
        weights=shape.parameters * s + _MASTER * shape.parameters // processes,
        optimiser=alone.optimiser // processes,
        critic=(_MASTER + _ADAM) * shape.trunk // processes if alone.critic else 0,
        gradients=_MASTER * shape.parameters // processes,
    )


def adapters(shape: Shape, rank: int) -> int:
    """Parameters of LoRA layers of a rank beside all linear layers: rank · (inputs + outputs) each."""
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.feed_forward))


def held_weights(parameters: int, s: int) -> int:
    """Of weights that are trained, and of their gradients: 4·P in float32; in bfloat16 copies too, (4 + 2)·P.

    With LoRA those are the adapters', and the others take s·P and have no gradients. The critic's gradients come after
    the actor's are gone.
    """
    return parameters * (_MASTER + (s if s < _MASTER else 0))


def critic(shape: Shape, config: Config) -> int:
    """A trunk of its own with its optimiser, as many bytes a parameter as the actor's; 0 with a shared trunk or none.

    The value head's H + 1 parameters are left out.
    """
    if config.critic.trunk == "shared" or not ADVANTAGES[config.advantage.kind].needs_critic:
        return 0
    return held_weights(shape.trunk, _bytes(config)) + _ADAM * shape.trunk


def activations(shape: Shape, s: int, tokens: int, width: int, *, recomputed: bool) -> int:
    """What a micro-batch of some tokens in sequences of some width keeps for its backward pass.

    A token takes in a layer: for each of its two norms the input in float32, the normed and the scaled, (4 + 2·s)·H;
    queries, keys and values as attention reads them and its output, 4·s·Q; four of the feed-forward, 4·s·F; its line of
    the mask, s·width, and once that of the plain mask, width. The last norm takes another (4 + s)·H. With gradient
    checkpointing a layer keeps its input, s·H, and one layer at a time the rest.
    """
    layer = 2 * (4 + 2 * s) * shape.hidden + 4 * s * (shape.queries + shape.feed_forward) + s * width
    layers = shape.layers * s * shape.hidden + layer if recomputed else shape.layers * layer
    return tokens * (layers + width + (4 + s) * shape.hidden)


def cache(shape: Shape, s: int, config: Config, longest: int) -> int:
    """Keys and values, 2·s·D·C a token, of L tokens of every row that is held, and one layer more while they are moved.

    Those of all parts where they are kept from turn to turn, else of one.
    """
    return 2 * s * (shape.layers + 1) * shape.keys * longest * _held_rows(config)


def sampling(shape: Shape, s: int, config: Config, episode: Episode, longest: int) -> int:
    """Reading prompts, or drawing a token for every row, whichever takes more.

    A token that is read takes s·(4·H + 3·F), and its line of the mask (1 + s)·L; a logit of a row 36. Members of a
    group read their first prompt together (a validation has no groups); later, each reads its own turn, or with fewer
    turns of context or no kept cache its whole prompt.
    """
    rows = _decoded_rows(config)
    first = -(-max(_groups(config), _validated(config)) // config.rollout.parts) * episode.prompt
    later = episode.turn if _keeps(config) else longest - _answer(config)
    read = max(first, rows * later if episode.turns > 1 else 0)
    reading = read * (s * (4 * shape.hidden + 3 * shape.feed_forward) + (1 + s) * longest)
    return max(reading, _SAMPLED_LOGITS * shape.vocabulary * rows)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The largest micro-batch: its padded tokens, the width of its sequences, and how many of its tokens are actions.

    `longest` is L: the first prompt, an answer, and both of every later turn that is read, up to the model's limit.
    """

    longest: int
    width: int
    tokens: int
    actions: int

    @staticmethod
    def of(config: Config, episode: Episode) -> "_Rows":
        a, turns = _answer(config), min(config.rollout.context_turns or episode.turns, episode.turns)
        longest = min(episode.positions, episode.prompt + a + (turns - 1) * (episode.turn + a))
        # What members of a group begin with is read once for as many of them as `logprobs` puts in a sequence.
        if config.rollout.context_turns == 0:
            shared, taught, rows = episode.prompt, turns * a, 1
        else:
            shared, taught, rows = longest - a, a, episode.turns
        own = max(1, longest - shared)
        taught = min(taught, own)
        together = max(1, min(config.rollout.group_size, (GROWTH * longest - shared) // own))
        width = shared + together * own
        all_rows = rows * config.update.minibatch_episodes
        tokens = max(width, min(config.update.microbatch_tokens, all_rows * longest))
        return _Rows(longest, width, tokens, min(tokens * together * taught // width, all_rows * taught))


def refuse_what_does_not_fit(
    shape: Shape, config: Config, episode: Episode, available: int, processes: int = 1
) -> None:
    """Raises ConfigError where a run would take more than `available` bytes; names settings with which it would not."""
    found = estimate(shape, config, episode, processes)
    if found.peak <= available:
        return
    if fitting := savings(shape, config, episode, available, processes):
        remedy = "it would fit with " + ", or with ".join(" and ".join(settings) for settings in fitting)
    else:
        remedy = "no settings of this policy would fit; take a smaller policy.model, or another machine"
    raise ConfigError(
        f"memory: this run takes {found.line()}; there are {told(available)}; {remedy} (run.check_memory=false starts "
        "it as it is)"
    )


def savings(
    shape: Shape, config: Config, episode: Episode, available: int, processes: int = 1
) -> list[tuple[str, ...]]:
    """Settings with which a run would fit in some bytes: each change that does alone, else the first that do together.

    Returns:
        Alternatives, each of `section.key=value`; none: not even all of them together would do.
    """

    def fits(settings: tuple[str, ...]) -> bool:
        changed = load_config(base=config_tree(config), settings=settings)
        return estimate(shape, changed, episode, processes).peak <= available

    ladders = list(_offers(config, processes))
    if alone := [next(filter(fits, ladder)) for ladder in ladders if fits(ladder[-1])]:
        return alone
    return [together for together in accumulate(ladder[-1] for ladder in ladders) if fits(together)][:1]


def _offers(config: Config, processes: int) -> Iterator[list[tuple[str, ...]]]:
    """Changes that save memory, those that leave a run's course alone first; each in steps, the smallest first.

    Steps that other settings forbid are left out.
    """
    ladders: list[list[tuple[str, ...]]] = [
        [(f"update.microbatch_tokens={n}",) for n in _halved(config.update.microbatch_tokens, _LEAST_BUDGET)]
    ]
    if not config.policy.gradient_checkpointing:
        ladders.append([("policy.gradient_checkpointing=true",)])
    parts = (config.rollout.parts * factor for factor in (2, 4, 8, 16))
    kept = ("rollout.keep_cache=false",) if _keeps(config) else ()
    ladders.append([(f"rollout.parts={n}", *kept) for n in parts if n <= _episodes(config)])
    own_trunk = config.critic.trunk == "own" and ADVANTAGES[config.advantage.kind].needs_critic
    if own_trunk:
        ladders.append([("critic.trunk=shared",)])
    if not config.lora.rank:
        ladders.append([("lora.rank=16", *(("critic.trunk=shared",) if own_trunk else ()))])
    if config.kl.coefficient > 0.0:
        ladders.append([("kl.coefficient=0.0",)])
    for ladder in ladders:
        if allowed := [settings for settings in ladder if _may_be_set(config, settings, processes)]:
            yield allowed


def _halved(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def _may_be_set(config: Config, settings: tuple[str, ...], processes: int) -> bool:
    try:
        check_processes(load_config(base=config_tree(config), settings=settings), processes)
    except ConfigError:
        return False
    return True


def _bytes(config: Config) -> int:
    return 2 if config.policy.dtype == "bfloat16" else 4


def _answer(config: Config) -> int:
    return config.rollout.max_response_tokens


def _keeps(config: Config) -> bool:
    return config.rollout.keep_cache and config.rollout.context_turns == 0


def _episodes(config: Config) -> int:
    """Of a rollout or a validation, whichever plays more at once."""
    return max(_groups(config) * config.rollout.group_size, _validated(config))


def _groups(config: Config) -> int:
    return config.rollout.groups * config.rollout.reuse


def _validated(config: Config) -> int:
    return config.validation.episodes if config.validation.every else 0


def _decoded_rows(config: Config) -> int:
    return -(-_episodes(config) // config.rollout.parts)


def _held_rows(config: Config) -> int:
    return _episodes(config) if _keeps(config) else _decoded_rows(config)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
