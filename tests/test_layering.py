"""Which package may import which: the arrows of the architecture, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "turngym": ROOT / "proto/turngym",
    "turngym_server": ROOT / "env_server/turngym_server",
    "turngym_client": ROOT / "client/turngym_client",
    "turngym_trainer": ROOT / "trainer/turngym_trainer",
    "turngym_leaderboard": ROOT / "leaderboard/turngym_leaderboard",
}
ALLOWED = {
    "turngym": set[str](),
    "turngym_server": {"turngym"},
    "turngym_client": {"turngym"},
    "turngym_trainer": {"turngym", "turngym_client"},
    "turngym_leaderboard": {"turngym", "turngym_client"},
}
MAY_IMPORT_THE_TRAINER = "turngym_leaderboard/agents/checkpoint.py"


def imported_packages(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere, inside functions too."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", SOURCES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = sorted(SOURCES[package].rglob("*.py"))
    assert files
    for file in files:
        ours = imported_packages(file) & SOURCES.keys() - {package}
        if file.as_posix().endswith(MAY_IMPORT_THE_TRAINER):
            ours -= {"turngym_trainer"}
        forbidden = ours - ALLOWED[package]
        assert not forbidden, f"{file.relative_to(ROOT)} imports {sorted(forbidden)}; {package} may not"


def test_the_conformance_kit_knows_servers_by_their_replies_alone() -> None:
    files = sorted((SOURCES["turngym_server"] / "conformance").glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turngym_server"):
                assert (node.module or "").startswith("turngym_server.conformance"), (
                    f"{file.name} imports {node.module}"
                )


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("turngym_client", ["torch", "transformers", "gymnasium", "numpy", "turngym_server"]),
        ("turngym_server.server", ["torch", "transformers", "turngym_client"]),
        ("turngym_leaderboard.client", ["torch", "transformers", "fastapi", "sqlalchemy", "turngym_server"]),
        ("turngym_leaderboard.service.app", ["torch", "transformers", "turngym_server", "turngym_trainer"]),
        ("turngym_leaderboard", ["torch", "transformers", "turngym_server", "turngym_trainer"]),
    ],
)
def test_an_import_leaves_heavy_packages_unloaded(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set({unwanted!r}) & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not loaded
