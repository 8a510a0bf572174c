"""The endpoints that a board plays: models behind OpenAI-compatible servers, registered by its operator in a file.

Who submits names one of them, so that a worker sends requests, keys and episodes nowhere but where its operator said.

    [small]                                  # what it is submitted by
    url = "https://api.example.com/v1"
    model = "small-1"
    key_file = "small.key"                   # beside this file; or key_env
    price_in = 0.5
    price_out = 1.5
    requests_per_minute = 60
    owners = ["alice"]                       # who may submit it beside admins: requests cost money

All other keys are those of `turngym_leaderboard.agents.chat_completions.EndpointSettings`. Keys are read by the worker
when it plays, and by nobody else.
"""

import difflib
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, TypeAdapter, ValidationError

from turngym_leaderboard.agents import AgentUnavailable
from turngym_leaderboard.agents.chat_completions import EndpointSettings, completions_url, read_key
from turngym_leaderboard.agents.endpoint import EndpointAgent
from turngym_leaderboard.boards import Slug


class EndpointsError(ValueError):
    """A file that registers no endpoints. The message says where and what was expected."""


def _address(url: str) -> str:
    completions_url(url)
    return url


class RegisteredEndpoint(EndpointSettings):
    """An endpoint as the file has it.

    Attributes:
        owners: who may submit it, beside admins.
    """

    url: Annotated[str, AfterValidator(_address)]
    owners: tuple[str, ...] = ()


Endpoints = Mapping[str, RegisteredEndpoint]
"""By the names that they are submitted by."""

_log: Final = logging.getLogger(__name__)

_FILE = TypeAdapter(dict[Slug, RegisteredEndpoint])


def load_endpoints(file: Path) -> Endpoints:
    """Reads the file; files of keys lie relative to it. Keys are not read.

    Raises:
        EndpointsError: it registers none, or something else beside them.
        OSError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            told = tomllib.load(stream)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EndpointsError(f"{file} is no TOML: {error}") from error
    try:
        found = _FILE.validate_python(told)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        near = difflib.get_close_matches(
            str(first["loc"][-1]) if first["loc"] else "", RegisteredEndpoint.model_fields, 1
        )
        hint = f"; did you mean {near[0]}?" if first["type"] == "extra_forbidden" and near else ""
        raise EndpointsError(f"{file} registers no endpoints: {where}: {first['msg']}{hint}") from error
    if not found:
        raise EndpointsError(
            f"{file} registers no endpoint; expected a table of each, as in [small] with url and model"
        )
    return {name: _beside(file, each) for name, each in found.items()}


def check_keys(endpoints: Endpoints) -> None:
    """Reads the keys of all endpoints, for whoever plays them. Raises EndpointsError where one is not there."""
    for name, endpoint in endpoints.items():
        try:
            read_key(endpoint, completions_url(endpoint.url))
        except ValueError as error:
            raise EndpointsError(f"endpoint {name!r} cannot be played: {error}") from error


def warn_of_unowned(endpoints: Endpoints) -> None:
    """Logs which endpoints nobody but admins may submit, as when their owners were forgotten."""
    for name, endpoint in endpoints.items():
        if not endpoint.owners:
            _log.warning('endpoint %r has no owners, so only admins may submit it; name them as owners = ["…"]', name)


def registered_agent(endpoints: Endpoints, name: str, registered_as: str, most_tokens: int) -> EndpointAgent:
    """The agent of a submission.

    Args:
        name: of the submission. registered_as: what it submits.
        most_tokens: that it may write in a turn, whatever its settings allow.

    Raises:
        AgentUnavailable: it is not registered here, or its key is not where the file says; where that is stands in the
            log, and is no submitter's business.
    """
    endpoint = endpoints.get(registered_as)
    if endpoint is None:
        raise AgentUnavailable(
            f"no endpoint {registered_as!r} is registered with the board's worker; its operator can register it and "
            "queue the submission again"
        )
    settings = endpoint.model_copy(update={"max_tokens": min(endpoint.max_tokens, most_tokens)})
    try:
        return EndpointAgent(endpoint.url, settings, name=name, known_as=f"endpoint:{registered_as}")
    except AgentUnavailable as error:
        _log.error("endpoint %r cannot be played: %s", registered_as, error)
        raise AgentUnavailable(
            f"the board's worker has no key for endpoint {registered_as!r}; its operator finds more in the worker's "
            "log, and can queue the submission again"
        ) from error


def _beside(file: Path, endpoint: RegisteredEndpoint) -> RegisteredEndpoint:
    if endpoint.key_file is None:
        return endpoint
    return endpoint.model_copy(update={"key_file": file.parent / endpoint.key_file})
