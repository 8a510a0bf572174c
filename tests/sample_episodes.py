"""Files of episodes as a training run and an evaluation write them, for tests of what shows them."""

import json
from pathlib import Path

BOARD = "######\n#____#\n#P_X_#\n#__O_#\n#____#\n######"
PUSHED = "######\n#____#\n#_P_X#\n#__O_#\n#____#\n######"
LAKE = "P___\n_O__\n__G_\n____"
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'><svg onload=alert(1)>"
    "{{ 7 * 7 }}{% include 'base.html' %}\u202egpj.exe\x00\x1b[2J&lt;b&gt;</pre></body>javascript:alert(1)"
)
"""What an agent may write to harm whoever looks at it."""


def training_turn(observation=BOARD, *, response="", reasoning="push right", actions=("Right",), reward=-0.1, **others):
    return {
        "observation": observation,
        "response": response,
        "reasoning": reasoning,
        "actions": list(actions),
        "actions_executed": len(actions),
        "reward": reward,
        "valid_format": True,
        "valid_action": True,
        **others,
    }


def training_episode(iteration=1, *, turns=2, success=True, environment="sokoban", seed=1 << 63, **others):
    return {
        "iteration": iteration,
        "environment": environment,
        "group": 0,
        "member": iteration,
        "level_seed": seed,
        "noise_seed": 7,
        "world_id": "w",
        "success": success,
        "terminated": True,
        "truncated": False,
        "outgrown": False,
        "digest": "ab" * 32,
        "environment_return": -0.1 * turns,
        "turns": [training_turn(BOARD if turn % 2 == 0 else PUSHED) for turn in range(turns)],
        "last_observation": PUSHED,
        "reward": -0.2,
        "kept": True,
        **others,
    }


def write_lines(file: Path, *episodes: dict, cut: int = 0) -> Path:
    """Writes episodes, one a line. `cut`: bytes of the last line that are not written yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(episode, ensure_ascii=False, separators=(",", ":")) + "\n" for episode in episodes)
    whole = text.encode("utf-8", errors="surrogatepass")
    file.write_bytes(whole[: len(whole) - cut])
    return file
