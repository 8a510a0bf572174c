"""A real server as a process of its own, and a policy that knows the form of an answer and nothing else."""

import numpy as np
import pytest
import torch
from server_process import ServerProcess

from turngym_trainer.batch import lay_out
from turngym_trainer.context import Context, Conversation, demonstration, system_message
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.policy import load_policy
from turngym_trainer.trajectory import Trajectory, TurnRecord

ACTIONS = ("Up", "Down", "Left", "Right")
CONTEXT = Context(turns=1, instructions="none", prefill="<think>")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server():
    """Address of an environment server with bandit and sokoban."""
    environments = ("--env", "bandit", "--env", "sokoban")
    with ServerProcess(*environments, "--splits", "train,validation,all") as running:
        yield running.address


@pytest.fixture(scope="session")
def novice(tmp_path_factory):
    """Folder of a tiny policy that answers every board of Sokoban with a well-formed random move."""
    rng = np.random.default_rng(0)
    policy = load_policy("tiny")
    chat = policy.chat_format(system_message("none", "", "||", 5))
    episodes = []
    for index in range(96):
        conversation = Conversation(policy, chat, CONTEXT)
        conversation.show("\n".join("".join(rng.choice(list("#_OXP"), 6)) for _ in range(6)))
        conversation.answer(demonstration(policy, CONTEXT, "go", [str(rng.choice(ACTIONS))], "||"))
        turn = TurnRecord("", "", "", ("",), 0.0, True, True, 1)
        episodes.append(Trajectory("sokoban", index, 0, 0, 0, "", None, True, False, "", conversation.rows(), (turn,)))
    batch = lay_out(episodes)
    scorer = Scorer(policy.model, 1.0)
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=3e-3)
    for _ in range(12):
        for rows in np.split(rng.permutation(96), 3):
            for part in micro_batches(batch, np.sort(rows), 100_000, policy.device):
                optimiser.zero_grad()
                (-scorer.score(part)[0].mean()).backward()
                optimiser.step()
    folder = tmp_path_factory.mktemp("policy") / "novice"
    policy.save(folder)
    return folder
