"""The README's examples run as they stand, but for the address of the server."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

README = Path(__file__).parents[1] / "README.md"


def example(name: str) -> str:
    """The Python block that follows the comment `<!-- test: name -->`."""
    match = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"the README has no example {name!r}"
    return match[1]


def test_every_python_example_is_tested() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("```python") == len(re.findall(r"<!-- test: \w+ -->\n```python", text)) == 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the README's own environment beside ours."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "number.py").write_text(example("environment"), encoding="utf-8")
    environments = ("--env", "sokoban", "--env", "frozen_lake", "--env", "number:Number")
    with ServerProcess(*environments, path=folder) as running:
        yield running.address


def test_the_environment_of_the_readme_is_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "number.py").write_text(example("environment"), encoding="utf-8")
    # As the installed command does, -P leaves the working directory out.
    command = [sys.executable, "-P", "-m", "turngym_server.cli", "--env", "number:Number", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        server.terminate()
    assert re.fullmatch(r"env_server \S+ listening on 127\.0\.0\.1:\d+ serving number\n", line)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("name", "printed"), [("client", r"solved \d+ of 16\n"), ("gymnasium", "")])
def test_client_examples_run(server: str, name: str, printed: str) -> None:
    assert re.fullmatch(printed, run(example(name).replace("localhost:50051", server)))


def test_the_environment_of_the_readme_can_be_solved_over_the_wire(server: str) -> None:
    code = f"""
import turngym_client
with turngym_client.connect({server!r}) as client:
    episode = client.reset("number", level_seed=1)
    while not episode.done:
        transition = episode.step(episode.advise().actions)
    assert episode.step_index > 1
    print(transition.success, transition.reward)
"""
    assert run(code) == "True 1.0\n"
