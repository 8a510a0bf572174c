"""A model behind an OpenAI-compatible server as an agent.

A conversation is the environment's instructions, then observations and answers in turn. What is wrong with an answer is
the agent's fault in that turn: one that is empty, refused, cut off or not in the form counts as an invalid action. No
answer at all, after all tries, ends the episode as a failure, and so does a conversation that the model can read no
more. An outage is a failure of every episode that it meets, else it would pay to be out while losing; only where
nothing was ever answered does the agent count as unavailable. Tokens, and so costs, are the server's word.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from turngym_client import answer_form, parse_answer
from turngym_leaderboard import seeds
from turngym_leaderboard.agents import AgentUnavailable, Fault, Reply, Seat, View
from turngym_leaderboard.agents.chat_completions import ChatCompletions, Completion, EndpointSettings, RequestFailed
from turngym_leaderboard.protocol import SAMPLED, Decoding

FIRST: Final = 3
"""Requests of which one has to be answered before all others are sent."""
LOST: Final = 8
"""After so many requests in a row without an answer, those that wait in the same turn are not sent any more."""

_CHARACTERS_A_TOKEN: Final = 3
"""Few, for a guess at how many tokens a request takes before the server has said so."""


@dataclass(slots=True)
class _Conversation:
    """Attributes: tokens: of the last request and its answer, 0 where that is not known."""

    seat: Seat
    messages: list[dict[str, str]]
    tokens: int = 0


@dataclass(slots=True)
class _Turn:
    """One call of `act`. Attributes: outage: why no further request is sent; "" while they are."""

    session: httpx.AsyncClient
    slots: asyncio.Semaphore
    outage: str = ""
    answers: dict[int, Reply | Fault] = field(default_factory=dict[int, Reply | Fault])


class EndpointAgent:
    """Answers conversations with chat completions, several at once."""

    samples = True
    wants_legal_actions = False
    wants_advice = False

    def __init__(self, url: str, settings: EndpointSettings, *, name: str, known_as: str = "") -> None:
        """Reads the key; the server is not asked yet.

        Args:
            url: of the server, such as http://localhost:8000/v1.
            known_as: what is told instead of the address, which is then told to nobody; "": it is.

        Raises:
            AgentUnavailable: the address is none, or there is no key where the settings say.
        """
        self.name = name
        try:
            self._chat = ChatCompletions(url, settings, hides_address=bool(known_as))
        except ValueError as error:
            raise AgentUnavailable(f"endpoint {name!r}: {error}") from error
        self._known_as = known_as or self._chat.url
        self._settings = settings
        self._decoding = SAMPLED
        self._conversations: list[_Conversation] = []
        self._served = False
        self._lost = 0

    @property
    def description(self) -> dict[str, str]:
        told = {
            "kind": "endpoint",
            "url": self._known_as,
            "model": self._settings.model,
            "context": "all turns",
            "instructions": "environment",
            "max_response_tokens": str(self._settings.max_tokens),
        }
        if self._settings.price_in is not None:
            told["price"] = (
                f"${self._settings.price_in:g} read, ${self._settings.price_out:g} written, for a million tokens"
            )
        return told

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self._decoding = decoding
        self._conversations = [_Conversation(seat, [{"role": "system", "content": _system(seat)}]) for seat in seats]

    def act(self, views: Sequence[View]) -> Sequence[Reply | Fault]:
        """Asks for a turn in each conversation. Not to be called where an event loop runs.

        Raises:
            AgentUnavailable: nothing was ever answered, and the first requests are not either.
        """
        return asyncio.run(self._turn(views))

    async def _turn(self, views: Sequence[View]) -> list[Reply | Fault]:
        for view in views:
            message = {"role": "user", "content": view.transition.observation}
            self._conversations[view.seat].messages.append(message)
        async with self._chat.session() as session:
            turn = _Turn(session, asyncio.Semaphore(self._settings.concurrency))
            if not self._served:
                await self._begin(turn, views[:FIRST])
            async with asyncio.TaskGroup() as group:
                for view in views:
                    if view.seat not in turn.answers:
                        group.create_task(self._play(turn, view))
        return [turn.answers[view.seat] for view in views]

    async def _begin(self, turn: _Turn, views: Sequence[View]) -> None:
        """Asks one after the other until the server has shown that it serves this model with this key."""
        failures: list[RequestFailed] = []
        for view in views:
            try:
                self._answer(turn, view, await self._ask(turn, view, connects=False))
            except RequestFailed as failure:
                self._fail(turn, view, failure)
                failures.append(failure)
                self._served = failure.outgrown
            if self._served:
                return
            if failures[-1].everybody or failures[-1].unreached:
                break
        raise AgentUnavailable(
            f"endpoint {self.name!r} answered none of its first requests to {self._known_as} "
            f"(model {self._settings.model!r}): {failures[-1]}"
        ) from failures[-1]

    async def _play(self, turn: _Turn, view: View) -> None:
        async with turn.slots:
            if turn.outage:
                turn.answers[view.seat] = Fault(turn.outage)
                return
            try:
                self._answer(turn, view, await self._ask(turn, view))
            except RequestFailed as failure:
                self._fail(turn, view, failure)

    async def _ask(self, turn: _Turn, view: View, *, connects: bool = True) -> Completion:
        conversation = self._conversations[view.seat]
        settings = self._settings
        if settings.context_tokens and conversation.tokens + settings.max_tokens > settings.context_tokens:
            raise RequestFailed(
                "context",
                f"{conversation.tokens} tokens so far and {settings.max_tokens} for an answer are more than "
                f"{settings.context_tokens}",
                outgrown=True,
            )
        characters = sum(len(message["content"]) for message in conversation.messages)
        return await self._chat.complete(
            turn.session,
            conversation.messages,
            temperature=0.0 if self._decoding.greedy else self._decoding.temperature,
            seed=seeds.request_seed(conversation.seat.seed, self.name, view.turn),
            tokens=characters / _CHARACTERS_A_TOKEN + settings.max_tokens,
            connects=connects,
        )

    def _answer(self, turn: _Turn, view: View, completion: Completion) -> None:
        conversation = self._conversations[view.seat]
        # Some servers take no empty message.
        content = completion.text if completion.text.strip() else "(no answer)"
        conversation.messages.append({"role": "assistant", "content": content})
        conversation.tokens = (completion.tokens_in or 0) + (completion.tokens_out or 0)
        turn.answers[view.seat] = _reply(conversation.seat, completion, self._settings)
        turn.outage = ""
        self._served, self._lost = True, 0

    def _fail(self, turn: _Turn, view: View, failure: RequestFailed) -> None:
        turn.answers[view.seat] = Fault(str(failure), truncated=failure.outgrown)
        if failure.passing or failure.everybody:
            self._lost += 1
        if self._lost >= LOST and not turn.outage:
            turn.outage = f"outage: {self._lost} requests in a row were not answered, the last: {failure}"


def _system(seat: Seat) -> str:
    """The message that a conversation begins with."""
    return f"{seat.instructions}\n\n{answer_form(seat.action_separator, seat.max_actions_per_turn)}."


def _reply(seat: Seat, completion: Completion, settings: EndpointSettings) -> Reply:
    """What an answer comes to. Reasoning may stand beside it, or in front of it between think tags."""
    thought, answer = split_reasoning(completion.text)
    whole = not (completion.cut_off or completion.refusal)
    parsed = parse_answer(
        f"<think></think>{answer}" if whole else "",
        seat.action_separator,
        max_actions=seat.max_actions_per_turn or None,
    )
    if completion.refusal:
        failure = f"refused: {completion.refusal}"
    elif completion.cut_off:
        failure = f"cut off: at {settings.max_tokens} tokens"
    elif not answer.strip():
        failure = "empty: there is no answer"
    else:
        failure = "" if parsed.valid_format else "unreadable: the answer is not in the form"
    return Reply(
        text=completion.text,
        reasoning="\n\n".join(filter(None, (completion.reasoning.strip(), thought))),
        actions=parsed.actions,
        valid_format=parsed.valid_format,
        cut_off=completion.cut_off,
        tokens=completion.tokens_out,
        tokens_in=completion.tokens_in,
        cost=_cost(completion, settings),
        failure=failure,
    )


def split_reasoning(text: str) -> tuple[str, str]:
    """What stands before the last end of thinking, without its tags, and what stands behind it.

    A model's own thinking may come before what it was asked to think, and its first tag may stand in the prompt.
    """
    thought, _, answer = text.rpartition("</think>")
    parts = (part.strip() for part in thought.replace("<think>", "").split("</think>"))
    return "\n\n".join(filter(None, parts)), answer


def _cost(completion: Completion, settings: EndpointSettings) -> float | None:
    """US dollars."""
    if completion.tokens_in is None or completion.tokens_out is None:
        return None
    if settings.price_in is None or settings.price_out is None:
        return None
    return (completion.tokens_in * settings.price_in + completion.tokens_out * settings.price_out) / 1e6
