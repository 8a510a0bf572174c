"""Writes the Python stubs of the contract, or with --check fails when the committed ones differ.

Runs in a virtual environment of its own (`make stubs`): grpcio-tools stamps its protobuf version into the stubs.
"""

import argparse
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

PROTO = "turngym/v1/environment.proto"
STUBS = ("environment_pb2.py", "environment_pb2.pyi", "environment_pb2_grpc.py", "environment_pb2_grpc.pyi")


def generate(source: Path, out: Path) -> None:
    """Compiles `source`/PROTO into `out`. Raises CalledProcessError when it does not compile."""
    google = distribution("googleapis-common-protos").locate_file("")
    plugins = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--proto_path={source}",
            f"--proto_path={google}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            PROTO,
        ],
        check=True,
    )


def stale(source: Path) -> list[str]:
    """Names of the committed stubs under `source` that differ from what its proto compiles to."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(source, Path(scratch))
        fresh = Path(scratch) / PROTO
        committed = source / PROTO
        return [
            name
            for name in STUBS
            if not (committed.with_name(name)).exists()
            or fresh.with_name(name).read_bytes() != committed.with_name(name).read_bytes()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when a stub is stale")
    parser.add_argument("--source", type=Path, default=Path(__file__).parent, help="folder that holds turngym/v1")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.source, arguments.source)
    elif names := stale(arguments.source):
        raise SystemExit(f"stale stubs: {', '.join(names)} differ from {PROTO}; run `make stubs` and commit the result")


if __name__ == "__main__":
    main()
