"""Asks an OpenAI-compatible server for one chat completion: POST …/chat/completions, until it has been answered.

What may pass is tried again: timeouts, cut connections, 408, 409, 425, 429 and 5xx, with exponential backoff and
jitter, or as long as Retry-After says. Redirects are not followed, so that the key goes nowhere else; it appears in no
text that leaves this module, not even where the server sends it back. Knows nothing of episodes.
"""

import asyncio
import email.utils
import os
import re
import secrets
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turngym import __version__
from turngym_leaderboard.agents.pace import Pace

FIRST_WAIT: Final = 0.5
"""Seconds before the second try, at most; each further wait may be twice as long."""
LONGEST_WAIT: Final = 60.0
CONNECTS_WITHIN: Final = 10.0
"""Seconds that connecting may take, or all of a try where that is less."""
ANSWER_END: Final = "</answer>"
_PASSING: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 508, 529})
_OF_EVERYBODY: Final = frozenset({401, 402, 403, 404, 405, 410})
_SPENT: Final = re.compile(r"insufficient_quota|billing|credit balance", re.IGNORECASE)
_OUTGROWN: Final = re.compile(
    r"context[_ ](?:length|size|window)|exceed_context|maximum context|(?:prompt|input) is too long|too many tokens|"
    r"reduce the length",
    re.IGNORECASE,
)
_SHOWN: Final = 200
"""Characters of what a server said that an error shows."""
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class EndpointSettings(BaseModel):
    """What is asked, and how. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="What the server calls the model.")
    key_env: str = Field(default="", description="Environment variable that holds the key.")
    key_file: Path | None = Field(default=None, description="File that holds the key, instead.")
    max_tokens: int = Field(default=1024, ge=1, description="Tokens that an answer may have, reasoning included.")
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="What the server calls that."
    )
    context_tokens: int = Field(default=0, ge=0, description="Tokens that the model can read and write; 0: not known.")
    concurrency: int = Field(default=16, ge=1, description="Requests at once.")
    requests_per_minute: float = Field(default=0, ge=0, description="0: no limit.")
    tokens_per_minute: float = Field(default=0, ge=0, description="Read and written; 0: no limit.")
    timeout: float = Field(default=120, gt=0, description="Seconds that one try may take.")
    tries: int = Field(default=8, ge=1, description="Of one answer.")
    patience: float = Field(default=600, gt=0, description="Seconds that all tries of one answer may take together.")
    price_in: float | None = Field(default=None, ge=0, description="US dollars for a million tokens read.")
    price_out: float | None = Field(default=None, ge=0, description="US dollars for a million tokens written.")
    stop_at_answer: bool = Field(
        default=False, description="Have the server stop at </answer>, for models that would write on."
    )
    plain_http: bool = Field(default=False, description="Send the key to another machine without TLS.")

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.key_env and self.key_file is not None:
            raise ValueError("key_env and key_file both name a key; give one of them")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("price_in and price_out go together")
        return self


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Attributes:
        reasoning: that came beside the text.
        cut_off: it had as many tokens as were allowed, or more.
        refusal: the server's or model's word that it will not answer; "": none.
        tokens_in, tokens_out: as the server tells; None: it does not.
    """

    text: str
    reasoning: str
    cut_off: bool
    refusal: str
    tokens_in: int | None
    tokens_out: int | None


class RequestFailed(Exception):
    """No answer came. The message begins with the kind of failure and a colon, and never holds the key.

    Attributes:
        passing: it may be tried again. after: seconds that the server wants to be left alone; None: it does not say.
        everybody: it is not this request's fault: nothing can be asked of this server, of this model or with this key.
        outgrown: the conversation is longer than the model can read.
        unreached: there was no connection to the server.
    """

    def __init__(
        self,
        kind: str,
        told: str,
        *,
        passing: bool = False,
        after: float | None = None,
        everybody: bool = False,
        outgrown: bool = False,
        unreached: bool = False,
    ) -> None:
        super().__init__(f"{kind}: {told}")
        self.passing = passing
        self.after = after
        self.everybody = everybody
        self.outgrown = outgrown
        self.unreached = unreached


class _Reply(BaseModel):
    """Of what a server sends, what is read."""


class _Part(_Reply):
    text: str = ""


class _Message(_Reply):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(_Reply):
    message: _Message
    finish_reason: str | None = None


class _Usage(_Reply):
    # Bounded, so that no server's word overflows a sum or a column.
    prompt_tokens: int | None = Field(default=None, ge=0, le=10**9)
    completion_tokens: int | None = Field(default=None, ge=0, le=10**9)


class _Body(_Reply):
    choices: list[_Choice] = Field(min_length=1)
    usage: object = None


def completions_url(url: str) -> str:
    """The address that requests go to, of a server's address, with or without its path.

    Raises:
        ValueError: it is none, or holds what does not belong into it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an address such as https://api.example.com/v1")
    if "@" in parts.netloc:
        raise ValueError("an address holds no user or password; keys are given by key_env or key_file")
    if parts.query or parts.fragment:
        raise ValueError("expected an address without ? and #")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path or '/v1'}/chat/completions"
    try:
        # Reading the port is what checks it.
        return str(httpx.URL(f"{parts.scheme}://{parts.netloc}{path}", port=parts.port))
    except httpx.InvalidURL as error:
        raise ValueError(f"not an address: {error}") from error


def read_key(settings: EndpointSettings, url: str) -> str:
    """The key; "": none is used.

    Raises:
        ValueError: it is not where the settings say, is no key, or would travel unencrypted.
    """
    if settings.key_env:
        key, where = os.environ.get(settings.key_env, ""), f"environment variable {settings.key_env}"
    elif settings.key_file is not None:
        try:
            key, where = settings.key_file.read_text(encoding="utf-8"), str(settings.key_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the key's file {settings.key_file} cannot be read") from error
    else:
        return ""
    key = key.strip()
    if not key:
        raise ValueError(f"{where} holds no key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"{where} holds what cannot be a key: a space, a line break or another character")
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK and not settings.plain_http:
        raise ValueError("the key would travel unencrypted; use https, or plain_http=true where that is meant")
    return key


class ChatCompletions:
    """A server, a model and a key. Nothing is kept open between calls of `session`."""

    def __init__(self, url: str, settings: EndpointSettings, *, hides_address: bool = False) -> None:
        """Reads the key.

        Args:
            hides_address: from what is told of failures.

        Raises:
            ValueError: as `completions_url` and `read_key` do.
        """
        self.url = completions_url(url)
        parts = urlsplit(self.url)
        self._hidden_places = (parts.netloc, parts.hostname or parts.netloc) if hides_address else ()
        self.settings = settings
        self._key = read_key(settings, self.url)
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute)
        self._tls = ssl.create_default_context()
        # Generous for any language, and a bound for what a server may send.
        self._most_bytes = 256 * 1024 + 128 * settings.max_tokens

    def session(self) -> httpx.AsyncClient:
        """Connections for some requests, to be used as a context."""
        limits = httpx.Limits(max_connections=self.settings.concurrency)
        headers = {"User-Agent": f"turngym/{__version__}", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(self.settings.timeout, connect=min(self.settings.timeout, CONNECTS_WITHIN))
        return httpx.AsyncClient(verify=self._tls, timeout=timeout, limits=limits, headers=headers)

    async def complete(
        self,
        session: httpx.AsyncClient,
        messages: Sequence[dict[str, str]],
        *,
        temperature: float,
        seed: int,
        tokens: float,
        connects: bool = True,
    ) -> Completion:
        """One answer.

        Args:
            tokens: that reading and writing will take, about.
            connects: a server that cannot be reached may be there soon. False: that is told at once.

        Raises:
            RequestFailed: there is none.
        """
        body: dict[str, object] = {
            "model": self.settings.model,
            "messages": list(messages),
            "temperature": temperature,
            "seed": seed,
            self.settings.max_tokens_field: self.settings.max_tokens,
            "stream": False,
        }
        if self.settings.stop_at_answer:
            body["stop"] = [ANSWER_END]
        patience = self.settings.patience
        for number in range(1, self.settings.tries + 1):
            await asyncio.sleep(self._pace.start(time.monotonic(), tokens) - time.monotonic())
            # Waiting for our own pace is not the server's fault, so its time begins here.
            began = time.monotonic()
            try:
                completion = await self._try(session, body, min(self.settings.timeout, patience))
            except RequestFailed as failure:
                unreached = not connects and failure.unreached
                wait = backoff(number, failure.after)
                patience -= time.monotonic() - began + wait
                if number == self.settings.tries or not failure.passing or unreached or patience <= 0:
                    raise
                if failure.after is not None:
                    self._pace.hold(time.monotonic() + failure.after)
                await asyncio.sleep(wait)
            else:
                if completion.tokens_in is not None and completion.tokens_out is not None:
                    self._pace.correct(completion.tokens_in + completion.tokens_out - tokens)
                return completion
        raise AssertionError("a last try answers or raises")

    async def _try(self, session: httpx.AsyncClient, body: dict[str, object], allowed: float) -> Completion:
        try:
            async with asyncio.timeout(allowed):
                status, headers, content = await self._post(session, body)
        except (TimeoutError, httpx.TimeoutException) as error:
            unreached = isinstance(error, httpx.ConnectTimeout)
            told = (
                f"no {'connection' if unreached else 'answer'} within {CONNECTS_WITHIN if unreached else allowed:.3g} s"
            )
            raise RequestFailed("timeout", told, passing=True, unreached=unreached) from error
        except (httpx.HTTPError, OSError) as error:
            # OSError: what TLS says of a broken record, which httpx passes on as it is.
            told = self._hidden(str(error)) or type(error).__name__
            unreached = isinstance(error, httpx.ConnectError)
            raise RequestFailed("connection", told, passing=True, unreached=unreached) from error
        if status != 200:
            raise self._refusal(status, headers, content)
        return self._read(content)

    async def _post(self, session: httpx.AsyncClient, body: dict[str, object]) -> tuple[int, httpx.Headers, bytes]:
        async with session.stream("POST", self.url, json=body) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                # Unpacking could take any amount of memory, and was not asked for.
                raise RequestFailed("malformed", "the answer is compressed, which was not asked for")
            received = bytearray()
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > self._most_bytes:
                    raise RequestFailed("too long", f"the answer has more than {self._most_bytes:,} bytes")
            return response.status_code, response.headers, bytes(received)

    def _refusal(self, status: int, headers: httpx.Headers, content: bytes) -> RequestFailed:
        """What a status that is no success means."""
        said = " ".join(content[:4096].decode("utf-8", "replace").split())
        told = self._hidden(said)[:_SHOWN] or "nothing was said"
        if status in (400, 413, 422, 500) and _OUTGROWN.search(said):
            return RequestFailed("context", f"status {status}: {told}", outgrown=True)
        if status in _OF_EVERYBODY or (status == 429 and _SPENT.search(said)):
            kind = {401: "key", 403: "key", 402: "quota", 429: "quota"}.get(status, "address or model")
            return RequestFailed(kind, f"status {status}: {told}", everybody=True)
        kind = "rate limit" if status == 429 else f"status {status}"
        return RequestFailed(kind, told, passing=status in _PASSING, after=_seconds_after(headers.get("Retry-After")))

    def _read(self, content: bytes) -> Completion:
        try:
            body = _Body.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise RequestFailed("malformed", f"no chat completion: {where}: {self._hidden(first['msg'])}") from error
        try:
            usage = _Usage.model_validate(body.usage or {})
        except ValidationError:
            usage = _Usage()
        choice = body.choices[0]
        message, tokens = choice.message, usage.completion_tokens
        parts = message.content if isinstance(message.content, list) else [_Part(text=message.content or "")]
        text = "".join(part.text for part in parts)
        if self.settings.stop_at_answer and choice.finish_reason == "stop" and _is_open(text):
            # Servers leave out what they stopped at.
            text += ANSWER_END
        filtered = "the answer was filtered" if choice.finish_reason == "content_filter" else ""
        return Completion(
            text=self._hidden(text),
            reasoning=self._hidden(message.reasoning_content or message.reasoning or ""),
            cut_off=choice.finish_reason == "length" or (tokens is not None and tokens > self.settings.max_tokens),
            refusal=self._hidden(message.refusal or filtered),
            tokens_in=usage.prompt_tokens,
            tokens_out=tokens,
        )

    def _hidden(self, text: str) -> str:
        """A text of the server's, or of a library about it, without the key."""
        for place in self._hidden_places:
            text = text.replace(place, "[address]")
        return text.replace(self._key, "[key]") if self._key else text


def _is_open(text: str) -> bool:
    return text.count("<answer>") == text.count(ANSWER_END) + 1


def backoff(tries: int, after: float | None) -> float:
    """Seconds before the next try: what the server wants, or up to twice the last wait, half of it by chance."""
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (tries - 1))
    jitter = longest / 2 * (1 + secrets.randbelow(1 << 32) / (1 << 32))
    return jitter if after is None else after + jitter / 2


def _seconds_after(header: str | None) -> float | None:
    """Retry-After as seconds from now; None where it is missing or neither a number nor a date."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return seconds if 0 <= seconds < float("inf") else None
