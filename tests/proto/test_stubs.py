"""The committed stubs are what the proto compiles to, and load under every protobuf that pyproject.toml allows."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB_PYTHON = ROOT / ".venv-stubs/bin/python"


def check_stubs(source: Path) -> subprocess.CompletedProcess[str]:
    assert STUB_PYTHON.exists(), "the stubs' virtual environment is missing: run the tests by `make test`"
    command = [STUB_PYTHON, ROOT / "proto/make_stubs.py", "--check", "--source", source]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_committed_stubs_are_fresh() -> None:
    result = check_stubs(ROOT / "proto")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("message Pending {}", "message Pending { bool queued = 1; }", "environment_pb2.py"),
        ("rpc Advise(AdviseRequest)", "rpc Consult(AdviseRequest)", "environment_pb2_grpc.py"),
        ("// Renews leases. Idempotent.", "// Renews leases.", "environment_pb2_grpc.pyi"),
    ],
)
def test_an_edited_proto_is_noticed(tmp_path: Path, old: str, new: str, stale: str) -> None:
    shutil.copytree(ROOT / "proto/turngym", tmp_path / "turngym")
    proto = tmp_path / "turngym/v1/environment.proto"
    text = proto.read_text(encoding="utf-8")
    assert text.count(old) == 1
    proto.write_text(text.replace(old, new), encoding="utf-8")
    result = check_stubs(tmp_path)
    assert result.returncode == 1
    assert stale in result.stderr
    assert "make stubs" in result.stderr


@pytest.mark.parametrize("requirement", ["protobuf==5.29.0", "protobuf<8"])
def test_stubs_load_under_the_oldest_and_newest_protobuf(tmp_path: Path, requirement: str) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    chosen = [requirement, "googleapis-common-protos"]
    subprocess.run([*install, "--target", tmp_path, *chosen], check=True, capture_output=True)
    code = (
        "import google.protobuf\n"
        "from turngym.v1 import environment_pb2 as pb\n"
        "item = pb.StepItem(session_id='w.1', step_index=3, actions=['Up'])\n"
        "assert pb.StepItem.FromString(item.SerializeToString()) == item\n"
        "import turngym.v1.environment_pb2_grpc\n"
        "print(google.protobuf.__file__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path))
