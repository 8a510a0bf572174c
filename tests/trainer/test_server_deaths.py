"""The server is killed in the middle of resets, steps and forks and started again on its port, and nobody notices."""

import json
import signal
import threading
from pathlib import Path

import pytest
from server_process import ServerProcess

from turngym_client import connect
from turngym_trainer.settings import load_config
from turngym_trainer.train import train


class Supervisor:
    """Keeps a server alive on one port. Its first lives end as `deaths` says; the one after them does not end."""

    def __init__(self, deaths: list[str]) -> None:
        self.deaths = 0
        self._plan = [*deaths, ""]
        self._closing = False
        self._server = self._start(port=0)
        self.address = self._server.address
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _start(self, port: int) -> ServerProcess:
        return ServerProcess(
            "--env",
            "dying_sokoban:DyingSokoban",
            port=port,
            path=Path(__file__).parent,
            environment={"DIE_IN": self._plan[self.deaths]},
        ).start()

    def _watch(self) -> None:
        while True:
            with self._server.process as process:
                process.wait()
            if self._closing or process.returncode != -signal.SIGKILL:
                return
            self.deaths += 1
            self._server = self._start(self._server.port)

    def close(self) -> None:
        self._closing = True
        self._server.process.terminate()
        self._thread.join()


@pytest.fixture
def supervise():
    supervisors: list[Supervisor] = []

    def start(deaths: list[str]) -> Supervisor:
        supervisors.append(Supervisor(deaths))
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.close()


def test_a_run_outlives_its_server_and_plays_the_same_episodes(supervise, novice, tmp_path):
    settings = [
        "environment.id=dying_sokoban",
        "environment.reward_range=10.0",
        f"policy.model={novice}",
        "run.iterations=3",
        "rollout.groups=3",
        "rollout.group_size=4",
        "rollout.context_turns=1",
        "rollout.instructions=none",
        "rollout.max_response_tokens=12",
        "rollout.parts=2",
        "update.minibatch_episodes=12",
        "critic.warmup_iterations=1",
        "validation.every=2",
        "validation.episodes=4",
    ]
    runs: dict[str, Path] = {}
    for name, deaths in (
        ("undisturbed", []),
        ("killed", ["reset:2", "step:3", "reset:20", "step:33", "step:60", "reset:9", "step:17"]),
    ):
        supervisor = supervise(deaths)
        runs[name] = tmp_path / name
        config = load_config(
            preset="starpo_s", settings=[*settings, f"run.folder={runs[name]}", f"run.server={supervisor.address}"]
        )
        train(config)
        assert supervisor.deaths == len(deaths)

    logs = {name: (folder / "trajectories.jsonl").read_text() for name, folder in runs.items()}
    episodes = [json.loads(line) for line in logs["killed"].splitlines()]
    assert len({(e["iteration"], e["group"], e["member"]) for e in episodes}) == len(episodes) == 3 * 12
    assert logs["killed"] == logs["undisturbed"]  # Digests are part of it.


def test_a_fork_outlives_its_server(supervise):
    advice: dict[str, list[tuple[str, ...]]] = {}
    digests: dict[str, list[bytes]] = {}
    for name, deaths in (("undisturbed", []), ("killed", ["fork:2", "fork:1", "step:2"])):
        supervisor = supervise(deaths)
        with connect(supervisor.address) as client:
            original = client.reset("dying_sokoban", level_seed=5, noise_seed=6)
            original.step(["Up"])
            copies = [original.fork(noise_seed=7), original.fork(same_noise=True), original.fork(noise_seed=7)]
            advice[name] = [episode.advise().actions for episode in [original, *copies]]
            transitions = [
                episode.step(actions) for episode, actions in zip([original, *copies], advice[name], strict=True)
            ]
            digests[name] = [transition.digest for transition in transitions]
        assert supervisor.deaths == len(deaths)
    assert advice["killed"] == advice["undisturbed"]
    assert digests["killed"] == digests["undisturbed"]
    original, copy, same, other = digests["killed"]
    assert original == same
    assert copy == other != original
