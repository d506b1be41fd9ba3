"""Answers in the API's two forms, whole or chunk by chunk."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from wmtp_jax.generation.rows import Event, TokenLogprobs
from wmtp_jax.model import Model
from wmtp_jax.serve.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptDetails,
    TokenDraft,
    TopLogprob,
    Usage,
)
from wmtp_jax.serve.choices import Choice, logprobs_of


@dataclass
class Format(ABC):
    """One request's answer: ``logprobs`` and ``details`` are in it where they were asked for."""

    model: Model
    name: str
    logprobs: bool
    details: bool
    prefix: ClassVar[str]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        """Everything at once."""

    @abstractmethod
    def begin(self, choice: Choice) -> BaseModel | None:
        """A chunk before a choice's first text, if there is one."""

    @abstractmethod
    def chunk(self, choice: Choice, event: Event) -> BaseModel:
        """What an event added; the last event's says how the choice ended."""

    @abstractmethod
    def counts(self, choices: Sequence[Choice]) -> BaseModel:
        """A chunk with nothing but the usage."""

    def _body(self) -> dict[str, Any]:
        return dict(id=self.id, created=self.created, model=self.name)

    def _details(self, choice: Choice, events: Sequence[Event], *, ended: bool) -> dict[str, Any]:
        if not self.details:
            return {}
        tokens = [
            TokenDraft(text=text, drafted=drafted)
            for event in events
            for text, drafted in zip(event.pieces, event.drafted, strict=True)
        ]
        return dict(tokens=tokens, drafts=choice.drafts() if ended else None)


class CompletionFormat(Format):
    """`/v1/completions`."""

    prefix = "cmpl"

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        made = [
            CompletionChoice(
                index=choice.index,
                text=choice.text,
                finish_reason=choice.finish_reason,
                logprobs=self._logprobs(choice.events, 0),
                **self._details(choice, choice.events, ended=True),
            )
            for choice in choices
        ]
        return Completion(**self._body(), choices=made, usage=usage(choices))

    def begin(self, choice: Choice) -> BaseModel | None:
        return None

    def chunk(self, choice: Choice, event: Event) -> BaseModel:
        ended = event.finished is not None
        made = CompletionChoice(
            index=choice.index,
            text=event.text,
            finish_reason=choice.finish_reason if ended else None,
            logprobs=self._logprobs([event], len(choice.text) - len(event.text)),
            **self._details(choice, [event], ended=ended),
        )
        return Completion(**self._body(), choices=[made])

    def counts(self, choices: Sequence[Choice]) -> BaseModel:
        return Completion(**self._body(), choices=[], usage=usage(choices))

    def _logprobs(self, events: Sequence[Event], offset: int) -> CompletionLogprobs | None:
        if not self.logprobs:
            return None
        offsets = []
        for event in events:
            for piece in event.pieces:
                offsets.append(offset)
                offset += len(piece)
        told = logprobs_of(events)
        return CompletionLogprobs(
            tokens=[self.model.token_text(token) for token, _ in told],
            token_logprobs=[one.logprob for _, one in told],
            top_logprobs=[
                {self.model.token_text(token): value for token, value in reversed(one.top)} for _, one in told
            ],
            text_offset=offsets,
        )


class ChatFormat(Format):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        made = [
            ChatChoice(
                index=choice.index,
                message=ChatMessage(content=choice.text),
                finish_reason=choice.finish_reason,
                logprobs=self._logprobs(choice.events),
                **self._details(choice, choice.events, ended=True),
            )
            for choice in choices
        ]
        return ChatCompletion(**self._body(), choices=made, usage=usage(choices))

    def begin(self, choice: Choice) -> BaseModel | None:
        delta = Delta(role="assistant", content="")
        return ChatChunk(**self._body(), choices=[ChatChunkChoice(index=choice.index, delta=delta)])

    def chunk(self, choice: Choice, event: Event) -> BaseModel:
        ended = event.finished is not None
        made = ChatChunkChoice(
            index=choice.index,
            delta=Delta(content=event.text),
            finish_reason=choice.finish_reason if ended else None,
            logprobs=self._logprobs([event]),
            **self._details(choice, [event], ended=ended),
        )
        return ChatChunk(**self._body(), choices=[made])

    def counts(self, choices: Sequence[Choice]) -> BaseModel:
        return ChatChunk(**self._body(), choices=[], usage=usage(choices))

    def _logprobs(self, events: Sequence[Event]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        return ChatLogprobs(content=[self._token(token, told) for token, told in logprobs_of(events)])

    def _token(self, token: int, told: TokenLogprobs) -> ChatTokenLogprob:
        top = [TopLogprob(**self._named(other), logprob=value) for other, value in told.top]
        return ChatTokenLogprob(**self._named(token), logprob=told.logprob, top_logprobs=top)

    def _named(self, token: int) -> dict[str, Any]:
        text = self.model.token_text(token)
        return dict(token=text, bytes=None if "\ufffd" in text else list(text.encode()))


def usage(choices: Sequence[Choice]) -> Usage:
    """Each prompt counts once, however many choices it has."""
    prompts = {choice.prompt: choice for choice in reversed(choices)}
    read = sum(choice.running.prompt_tokens for choice in prompts.values())
    written = sum(len(choice.tokens) for choice in choices)
    return Usage(
        prompt_tokens=read,
        completion_tokens=written,
        total_tokens=read + written,
        prompt_tokens_details=PromptDetails(
            cached_tokens=sum(choice.running.reused_tokens for choice in prompts.values())
        ),
    )
