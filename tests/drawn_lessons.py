"""Episodes of drawn tokens, what is learnt from them, and updates that one process or several make of that."""

import numpy as np
import torch.distributed as dist

from turngym_trainer.batch import lay_out
from turngym_trainer.distributed import ALONE, Group, PeerError, joined
from turngym_trainer.policy import load_policy
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.sharded import whole
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner, Lesson

TURN = TurnRecord("", "", "", ("a",), 0.0, True, True, 1)
V = 100  # Ids that are used, of the tiny policy's vocabulary.


def random_batch(rng, B=7):
    """Episodes of 1 to 3 rows of unequal lengths; the second turn of a row of two begins after an observation."""

    def row(turns):
        pieces = [np.full(rng.integers(2, 9), -1)]
        for turn in turns:
            pieces += [np.full(rng.integers(1, 6), turn), np.full(rng.integers(1, 4), -1)]
        turn = np.concatenate(pieces)
        logprobs = np.where(turn >= 0, -4.6, 0).astype(np.float32)
        return Row(rng.integers(0, V, len(turn)), turn >= 0, turn, logprobs)

    episodes = []
    for index in range(B):
        rows = ([row([0, 1])], [row([0]), row([1]), row([2])], [row([0])])[index % 3]
        turns = 1 + max(int(r.turn.max()) for r in rows)
        episodes.append(
            Trajectory("e", index // 2, index % 2, 0, 0, "", None, True, False, "", tuple(rows), (TURN,) * turns)
        )
    return lay_out(episodes)


def lesson_of(learner, batch, rng, **changes):
    N = len(batch.logprobs)
    values = {
        "batch": batch,
        "old_logprobs": learner.logprobs(batch) + rng.normal(0, 0.3, N).astype(np.float32),
        "advantages": rng.normal(size=N),
        "values": rng.normal(size=N) * 5,
        "targets": rng.normal(size=N) * 5,
    }
    return Lesson(**{**values, **changes})


def everyone(batch):
    return np.arange(len(batch.lengths))


def updates(settings):
    """Three updates on drawn lessons: what came of them, as plain data. Mini-batches are of 1 to 5 episodes."""
    group = Group(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE
    config = load_config(
        settings=[
            "rollout.temperature=0.7",
            "environment.reward_range=10.0",
            "update.microbatch_tokens=60",
            "update.minibatch_episodes=5",
            "kl.estimator=k3",
            "kl.place=loss",
            *settings,
        ]
    )
    apart = config.kl.coefficient > 0.0 and not config.lora.rank
    reference = load_policy("tiny", seed=1, dtype=config.policy.dtype) if apart else None
    policy = load_policy("tiny")
    learner = Learner(policy, config, length_limit=60, with_critic=True, reference=reference, group=group)
    rng = np.random.default_rng(0)
    results = {"reports": [], "logprobs": [], "values": []}
    for iteration, B in enumerate((11, 6, 7), 1):
        batch = random_batch(rng, B)
        lesson = lesson_of(learner, batch, rng)
        critic_episodes = everyone(batch)
        actor_episodes = critic_episodes if config.critic.trunk == "shared" else critic_episodes[1:]
        report = learner.update(
            lesson, actor_episodes=actor_episodes, critic_episodes=critic_episodes, place=Place(iteration)
        )
        results["reports"].append([getattr(report, name) for name in report.__slots__])
        results["logprobs"].append(learner.logprobs(batch))
        results["values"].append(learner.values(batch))
        results["reference"] = learner.reference_logprobs(batch) if learner.reference else np.zeros(1)
    assert learner.critic is not None
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    results["actor"] = [weight.detach().float().numpy() for weight in trained]
    critic = whole(learner.critic.state_dict(), keep=True)
    results["critic"] = [tensor.detach().float().numpy() for tensor in critic.values()]
    return results


def together(kinds):
    """What several processes come to: updates by kind of settings, and what is heard where the last one fails."""
    return {name: updates(settings) for name, settings in kinds.items()}, _failing_alone()


def _failing_alone():
    try:
        with joined("cpu", (AssertionError,)) as group:
            assert group.rank < group.size - 1, "no such luck"
            group.exchange("something")
    except (AssertionError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
