"""One iteration's optimiser steps on actor and critic.

Letters as in `batch`: B episodes, N action tokens. Advantages, targets and log-probabilities come as arrays [N] in the
batch's flat order. Knows nothing of rewards, groups or environments.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turngym_trainer import seeds
from turngym_trainer.batch import Batch, lay_out_prompts
from turngym_trainer.config import Config
from turngym_trainer.critic import Critic
from turngym_trainer.distributed import ALONE, Group
from turngym_trainer.logprobs import MicroBatch, Scorer
from turngym_trainer.lora import Adapters
from turngym_trainer.loss import (
    clipped_surrogate,
    kl_loss,
    sampler_weights,
    sequence_log_ratios,
    token_weights,
    value_loss,
)
from turngym_trainer.masters import MasterWeights
from turngym_trainer.mixture import return_range
from turngym_trainer.policy import Policy
from turngym_trainer.recompute import recompute_layers
from turngym_trainer.schedule import rate_share
from turngym_trainer.seeds import Place
from turngym_trainer.sharded import ShardedActor, one_number, shard_critic


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one iteration learns from, each array [N].

    Attributes:
        old_logprobs: under the policy that the ratio is taken against.
        sampler_logprobs: under the sampler, where those differ; None: they do not.
        reference_logprobs: None unless the KL divergence is in the loss.
        advantages: whitened where they are to be.
        values: the critic's before the update, in units of rewards; None without a critic.
        targets: the critic's, in units of rewards; None without a critic.
    """

    batch: Batch
    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float64]
    values: NDArray[np.float64] | None = None
    targets: NDArray[np.float64] | None = None
    sampler_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None


OF_ACTOR: Final = (
    "policy_loss",
    "entropy",
    "gradient_norm",
    "gradient_norm_max",
    "clip_high",
    "clip_low",
    "clip_dual",
    "ratio_max",
    "old_kl",
    "reference_kl",
)
"""What an update says of the actor; where it trained the critic alone, nothing of this was measured."""


@dataclass(slots=True)
class UpdateReport:
    """What an update did. Means are over action tokens, or mini-batches where there is one value each.

    Attributes:
        actor_steps, critic_steps: optimiser steps taken.
        refused: steps not taken because a loss or gradient was not finite.
        gradient_norm: mean norm before clipping, of the actor. gradient_norm_max: the greatest.
        clip_high, clip_low, clip_dual: share of tokens whose gradient a bound took away.
        ratio_max: greatest π/π_old. old_kl: mean of ρ − 1 − log ρ.
        reference_kl: mean of the estimate in the loss, before β.
    """

    actor_steps: int = 0
    critic_steps: int = 0
    refused: int = 0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    gradient_norm: float = 0.0
    gradient_norm_max: float = 0.0
    critic_gradient_norm: float = 0.0
    clip_high: float = 0.0
    clip_low: float = 0.0
    clip_dual: float = 0.0
    ratio_max: float = 0.0
    old_kl: float = 0.0
    reference_kl: float = 0.0

    @property
    def optimiser_steps(self) -> int:
        """Steps of either optimiser; one that trains both counts once."""
        return max(self.actor_steps, self.critic_steps)


class Learner:
    """Actor, critic and reference with their optimisers.

    Args:
        policy: the actor, in float32; its forward passes are in `policy.dtype` from here on (see `MasterWeights`).
        config: see there.
        length_limit: L_max, the most action tokens that an episode may have: turns times tokens a turn.
        with_critic: the advantage needs values.
        reference: see below.
        group: the processes of the run. Where there are several, all call all methods together, and actor and critic
            are in shards; but with LoRA, where little is trained, each process has all of them.

    Raises:
        PolicyError: the policy cannot do gradient checkpointing or LoRA, which the settings ask for.

    Attributes:
        critic: None where the advantage needs none.
        adapters: what is trained of the policy; None: all of it.
        reference: what the KL divergence is measured from; None where β is 0. With adapters it is the policy without.
        optimisers: by name: `actor`, and `critic` where it has a trunk of its own.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        *,
        length_limit: int,
        with_critic: bool,
        reference: Policy | None,
        group: Group = ALONE,
    ) -> None:
        self.group = group
        self._config = config
        self._length_limit = length_limit
        self._budget = config.update.microbatch_tokens
        self.policy = policy
        _realign(policy)
        # What is probed here holds for the model, so it is probed before rounding blurs it.
        self.scorer = Scorer(policy.model, config.rollout.temperature)
        dtype = torch.bfloat16 if config.policy.dtype == "bfloat16" else torch.float32
        self.adapters = Adapters(policy, config.lora, dtype=dtype, seed=config.run.seed) if config.lora.rank else None
        self.reference = Scorer(reference.model, config.rollout.temperature) if reference else None
        if self.adapters is not None and config.kl.coefficient > 0.0:
            self.reference = self.scorer
        self.critic = (
            Critic(
                policy.model,
                own_trunk=config.critic.trunk == "own",
                reward_range=return_range(config),
            )
            if with_critic
            else None
        )
        if config.policy.gradient_checkpointing:
            recompute_layers(policy.model)
            if self.critic is not None and self.critic.own_trunk:
                recompute_layers(self.critic.trunk)
        self._score = self.scorer.score
        self._sharded = group.size > 1 and self.adapters is None
        if self._sharded:
            self._actor_weights = ShardedActor(policy.model, config.rollout.temperature, dtype)
            self._score = self._actor_weights
            if self.critic is not None:
                shard_critic(self.critic, dtype)
            dtype = torch.float32  # Shards are their own masters.
        else:
            trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
            self._actor_weights = MasterWeights(trained, dtype)
        self._critic_weights = MasterWeights(self.critic.trunk_parameters() if self.critic else [], dtype)
        self._actor_parameters = self._actor_weights.masters
        self._critic_parameters = self._critic_weights.masters
        if self.critic is not None:
            self._critic_parameters = [*self._critic_parameters, *self.critic.head.parameters()]
        groups: list[dict[str, object]] = [{"params": self._actor_parameters, "of": "actor"}]
        self._joint = self.critic is not None and not self.critic.own_trunk
        if self._joint:
            groups.append({"params": self._critic_parameters, "of": "critic"})
        self.optimisers = {"actor": self._optimiser(groups)}
        if self.critic is not None and self.critic.own_trunk:
            self.optimisers["critic"] = self._optimiser([{"params": self._critic_parameters, "of": "critic"}])

    @contextlib.contextmanager
    def float32_weights(self) -> Generator[None]:
        """Within, policy and critic hold the weights that are trained, to be written or read."""
        with self._actor_weights.exposed(), self._critic_weights.exposed():
            yield

    def save_policy(self, folder: Path) -> None:
        """Writes the policy in float32, in Hugging Face's layout, adapters merged into its weights.

        Of several processes the first one does.
        """
        with self.float32_weights():
            if not self.group.first:
                return
            if self.adapters is None:
                self.policy.save(folder)
            else:
                self.adapters.save_merged(folder)

    def _optimiser(self, groups: list[dict[str, object]]) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=self._config.update.weight_decay, fused=True)

    def logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """Log-probabilities under the policy as it is, [N]."""
        return self._logprobs(batch, np.arange(len(batch.rows)))

    def reference_logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """Log-probabilities under the reference policy, [N]."""
        assert self.reference is not None
        with self.adapters.off() if self.adapters is not None else contextlib.nullcontext():
            own = self._share(batch, np.arange(len(batch.rows)))
            return self.group.sum(self.reference.logprobs(batch, self._budget, own))

    @torch.no_grad()
    def values(self, batch: Batch) -> NDArray[np.float64]:
        """The critic's values, in units of rewards, [N]."""
        assert self.critic is not None
        values = np.zeros(len(batch.logprobs), dtype=np.float64)
        for part, counts in self._passes(batch, np.arange(len(batch.rows))):
            scaled = self.critic(part).cpu().numpy()
            if counts:
                values[part.tokens] = scaled
        return self.group.sum(values) * self.critic.reward_range

    @torch.no_grad()
    def _logprobs(self, batch: Batch, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probabilities under the policy as it is, [N]; 0 outside some rows."""
        scored = np.zeros(len(batch.logprobs), dtype=np.float32)
        for part, counts in self._passes(batch, rows):
            logprobs = self._score(part)[0].cpu().numpy()
            if counts:
                scored[part.tokens] = logprobs
        return self.group.sum(scored)

    def _share(self, batch: Batch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of some rows those that this process sees to."""
        return rows[self.group.share(np.array([len(batch.rows[int(row)].ids) for row in rows]))]

    def _passes(self, batch: Batch, rows: NDArray[np.int64]) -> Iterator[tuple[MicroBatch, bool]]:
        """This process's micro-batches of some rows, and whether each counts.

        A model in shards runs where all processes run it. One that has less to do than another repeats a row, which
        counts for nothing.
        """
        parts = self.scorer.micro_batches(batch, self._share(batch, rows), self._budget)
        idle = self.group.most(len(parts)) - len(parts)
        yield from ((part, True) for part in parts)
        for _ in range(idle):
            yield from ((part, False) for part in self.scorer.micro_batches(batch, rows[:1], self._budget))

    def last_values(self, prompts: Sequence[NDArray[np.int64] | None]) -> NDArray[np.float64]:
        """The critic's values of what would have been read next, 0 for None, [B]."""
        values = np.zeros(len(prompts), dtype=np.float64)
        if read := {index: prompt for index, prompt in enumerate(prompts) if prompt is not None}:
            values[list(read)] = self.values(lay_out_prompts(list(read.values())))
        return values

    def update(
        self,
        lesson: Lesson,
        *,
        actor_episodes: NDArray[np.int64],
        critic_episodes: NDArray[np.int64],
        place: Place,
    ) -> UpdateReport:
        """Trains the actor and the critic, each on its episodes of the lesson (none: it stays as it is).

        Steps whose loss or gradient is not finite are refused and counted; weights and optimiser stay as they were.
        """
        self._set_rates(place)
        report = UpdateReport()
        if self._joint and len(actor_episodes):
            assert np.array_equal(actor_episodes, critic_episodes), "a shared trunk learns both from the same episodes"
            self._pass(lesson, actor_episodes, report, place, actor=True, critic=True)
            return report
        if len(actor_episodes):
            self._pass(lesson, actor_episodes, report, place, actor=True, critic=False)
            self._actor_weights.publish()
        if len(critic_episodes) and self.critic is not None:
            self._pass(lesson, critic_episodes, report, place, actor=False, critic=True)
        return report

    def _set_rates(self, place: Place) -> None:
        """Learning rates of an iteration (from 1), less where the run was rolled back."""
        config, iteration = self._config, place.iteration
        left = rate_share(config.update, iteration, config.run.iterations)
        left *= config.guard.rate_factor**place.attempt
        rates = {"actor": config.update.learning_rate * left, "critic": config.critic.learning_rate * left}
        for optimiser in self.optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = rates[cast(str, group["of"])]

    def _pass(
        self,
        lesson: Lesson,
        episodes: NDArray[np.int64],
        report: UpdateReport,
        place: Place,
        *,
        actor: bool,
        critic: bool,
    ) -> None:
        """`epochs` passes over some episodes, in mini-batches whose sizes differ by at most one."""
        config = self._config
        parts = -(-len(episodes) // config.update.minibatch_episodes)
        own = _Sums()
        for epoch in range(config.update.epochs):
            order = seeds.permutation(
                config.run.seed, place.iteration, place.attempt, epoch, len(episodes), purpose="update"
            )
            for minibatch in np.array_split(episodes[order], parts):
                self._step(lesson, np.sort(minibatch), own, actor=actor, critic=critic)
        sums = _Sums.of_all(self.group.exchange(own))
        sums.write(report, actor=actor, critic=critic)

    def _step(self, lesson: Lesson, minibatch: NDArray[np.int64], sums: "_Sums", *, actor: bool, critic: bool) -> None:
        """One optimiser step: gradients of all micro-batches, checked, clipped, applied."""
        batch, device = lesson.batch, self.policy.device
        lengths = batch.lengths
        weights = np.zeros(len(batch.logprobs))
        weights[batch.tokens_of(minibatch)] = np.repeat(
            token_weights(lengths[minibatch], self._config.update.aggregation, self._length_limit), lengths[minibatch]
        )
        uniform = 1.0 / int(lengths[minibatch].sum())
        by_episode = self._config.update.ratio == "sequence"
        means = self._mean_log_ratios(lesson, minibatch) if actor and by_episode else None
        loss = torch.zeros((), device=device)
        for part, counts in self._passes(batch, batch.rows_of(minibatch)):
            part_loss = torch.zeros((), device=device)
            hidden = self.scorer.hidden(part) if actor and critic else None
            if not counts:
                part_loss = self._nothing(part, actor=actor)
            if counts and actor:
                part_loss = part_loss + self._actor_loss(lesson, part, hidden, weights, means, sums)
            if counts and critic:
                part_loss = part_loss + self._critic_loss(lesson, part, hidden, uniform, sums)
            # Shards get the mean of the processes' gradients, and the sum is wanted.
            times = self.group.size if self._sharded else 1
            cast(None, (part_loss * times).backward())  # pyright: ignore[reportUnknownMemberType]
            self._actor_weights.take_gradients()
            self._critic_weights.take_gradients()
            loss += part_loss.detach()
        optimiser = self.optimisers["actor" if actor or self._joint else "critic"]
        parameters = (self._actor_parameters if actor else []) + (self._critic_parameters if critic else [])
        if self.group.size > 1 and not self._sharded:
            _add_up_gradients(parameters, self.group)
        norm = one_number(torch.nn.utils.clip_grad_norm_(parameters, self._config.update.gradient_clip))
        loss = self.group.total(loss)
        if bool(torch.isfinite(loss)) and bool(torch.isfinite(norm)):
            optimiser.step()
            self._actor_weights.write_through()
            self._critic_weights.write_through()
            sums.stepped(float(norm))
        else:
            sums.refused += 1
        optimiser.zero_grad(set_to_none=True)

    def _nothing(self, part: MicroBatch, *, actor: bool) -> Tensor:
        """A loss of 0 that has all weights run and get gradients of 0."""
        assert self.critic is not None or actor
        return 0.0 * (self._score(part)[0].sum() if actor else cast(nn.Module, self.critic)(part).sum())

    def _mean_log_ratios(self, lesson: Lesson, minibatch: NDArray[np.int64]) -> NDArray[np.float64]:
        """Mean of log π − log π_old over each episode's tokens, on each of them, [N]; 0 outside the mini-batch."""
        batch = lesson.batch
        now = self._logprobs(batch, batch.rows_of(minibatch)).astype(np.float64)
        differences = np.where(batch.tokens_of(minibatch), now - lesson.old_logprobs, 0.0)
        means = np.add.reduceat(differences, batch.episode_offsets[:-1]) / batch.lengths
        return np.repeat(means, batch.lengths)

    def _actor_loss(
        self,
        lesson: Lesson,
        part: MicroBatch,
        hidden: Tensor | None,
        weights: NDArray[np.float64],
        mean_log_ratios: NDArray[np.float64] | None,
        sums: "_Sums",
    ) -> Tensor:
        config = self._config

        def pick(values: NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values[part.tokens].astype(np.float32)).to(logprobs.device)

        logprobs, entropy = self._score(part) if hidden is None else self.scorer.score(part, hidden)
        old, weight = pick(lesson.old_logprobs), pick(weights)
        corrected = weight
        if lesson.sampler_logprobs is not None:
            corrected = weight * sampler_weights(old, pick(lesson.sampler_logprobs))
        log_ratios = logprobs - old if mean_log_ratios is None else sequence_log_ratios(logprobs, pick(mean_log_ratios))
        surrogate = clipped_surrogate(log_ratios, pick(lesson.advantages), corrected, config.update)
        loss = surrogate.loss - config.update.entropy * (weight * entropy).sum()
        reference_kl = torch.zeros((), device=logprobs.device)
        if lesson.reference_logprobs is not None:
            reference_kl = kl_loss(logprobs, pick(lesson.reference_logprobs), weight, config.kl)
            loss = loss + reference_kl
        log_ratio = surrogate.ratio.log()
        sums.actor(
            tokens=len(part.tokens),
            totals={
                "policy_loss": surrogate.loss.detach(),
                "reference_kl": reference_kl.detach() / (config.kl.coefficient or 1.0),
            },
            token_totals={
                "entropy": entropy.detach().sum(),
                "clip_high": surrogate.clipped_high.sum(),
                "clip_low": surrogate.clipped_low.sum(),
                "clip_dual": surrogate.clipped_dual.sum(),
                "old_kl": (surrogate.ratio - 1.0 - log_ratio).sum(),
            },
            ratio_max=float(surrogate.ratio.max()),
        )
        return loss

    def _critic_loss(
        self, lesson: Lesson, part: MicroBatch, hidden: Tensor | None, weight: float, sums: "_Sums"
    ) -> Tensor:
        """The critic's loss. Alone, a head on a shared trunk trains without moving the trunk."""
        assert self.critic is not None
        assert lesson.targets is not None
        assert lesson.values is not None
        if hidden is not None:
            scaled = self.critic.scaled_values(hidden)
        elif self._joint:
            scaled = self.critic.scaled_values(self.critic.hidden(part).detach())
        else:
            scaled = self.critic(part)
        scale, clip = self.critic.reward_range, self._config.critic.clip
        old, targets = (
            torch.from_numpy((values[part.tokens] / scale).astype(np.float32)).to(scaled.device)
            for values in (lesson.values, lesson.targets)
        )
        loss = value_loss(scaled, old, targets, torch.full_like(targets, weight), clip)
        sums.totals["value_loss"] = sums.totals.get("value_loss", 0.0) + float(loss.detach())
        return loss * self._config.critic.coefficient if self._joint else loss


def _add_up_gradients(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Gives every process the sum of all processes' gradients; one that had nothing to do for a weight adds 0."""
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = group.total(gradient)


def _realign(policy: Policy) -> None:
    """Copies each weight to an address of torch's own choice.

    Weights that were read from a file lie where they lie in the file, and kernels may round differently on unaligned
    memory: a resumed run would leave an undisturbed one in the last bit.
    """
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.clone()


class _Sums:
    """What the mini-batches of a pass add up to."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.token_totals: dict[str, float] = {}
        self.tokens = 0
        self.ratio_max = 0.0
        self.norms: list[float] = []
        self.refused = 0

    @staticmethod
    def of_all(everyone: "Iterable[_Sums]") -> "_Sums":
        """What several processes' sums come to. Norms and refusals are the same in each."""
        first, *others = everyone
        for other in others:
            first.tokens += other.tokens
            first.ratio_max = max(first.ratio_max, other.ratio_max)
            for mine, theirs in ((first.totals, other.totals), (first.token_totals, other.token_totals)):
                for name, value in theirs.items():
                    mine[name] = mine.get(name, 0.0) + value
        return first

    def actor(
        self,
        *,
        tokens: int,
        totals: dict[str, Tensor],
        token_totals: dict[str, Tensor],
        ratio_max: float,
    ) -> None:
        self.tokens += tokens
        self.ratio_max = max(self.ratio_max, ratio_max)
        for name, value in totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)
        for name, value in token_totals.items():
            self.token_totals[name] = self.token_totals.get(name, 0.0) + float(value)

    def stepped(self, norm: float) -> None:
        self.norms.append(norm)

    def write(self, report: UpdateReport, *, actor: bool, critic: bool) -> None:
        steps = len(self.norms)
        report.refused += self.refused
        for name, total in self.totals.items():
            setattr(report, name, total / (steps + self.refused))
        for name, total in self.token_totals.items():
            setattr(report, name, total / self.tokens)
        mean_norm = float(np.mean(self.norms)) if steps else 0.0
        if actor:
            report.actor_steps, report.ratio_max = steps, self.ratio_max
            report.gradient_norm, report.gradient_norm_max = mean_norm, max(self.norms, default=0.0)
        if critic:
            report.critic_steps = steps
            if not actor:
                report.critic_gradient_norm = mean_norm
