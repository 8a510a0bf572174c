"""Files of tokens, as an operator writes them."""

from pathlib import Path

from turngym_server.access.tokens import digest_of, new_token


def write_tokens(path: Path, mode: int = 0o600, **entries: str) -> dict[str, str]:
    """A file with these tokens; each entry is a role, or the lines of its section but the hash.

    Returns:
        Each name's metadata.
    """
    tokens = {name: new_token(name) for name in entries}
    sections = [
        f'[{name}]\nsha256 = "{digest_of(tokens[name]).hex()}"\n' + (lines if "=" in lines else f'role = "{lines}"')
        for name, lines in entries.items()
    ]
    path.write_text("\n\n".join(sections) + "\n")
    path.chmod(mode)
    return {name: bearer(token) for name, token in tokens.items()}


def bearer(token: str, client: str = "") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), *([("turngym-client", client)] if client else []))
