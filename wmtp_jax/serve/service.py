"""From a checked body to an answer: what a request asks of which engine, and what becomes of it."""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from wmtp_jax.engine.engine import Engine, Running
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.serve.answers import ModelCard
from wmtp_jax.serve.choices import Choice, events
from wmtp_jax.serve.errors import ApiError, api_error
from wmtp_jax.serve.formats import ChatFormat, CompletionFormat, Format
from wmtp_jax.serve.metrics import Metrics
from wmtp_jax.serve.options import ServeOptions
from wmtp_jax.serve.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
)
from wmtp_jax.text.constraints import Constraint

# What the OpenAI API says where a completion gives no limit; a chat has all the room there is.
_COMPLETION_TOKENS = 16
_SAME_NAME = ("top_k", "min_p", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


class Service:
    """Requests of one server. ``close`` ends what is running.

    ``warm_up`` compiles everything before the first request.
    """

    def __init__(self, model: Model, options: ServeOptions, *, warm_up: bool = True):
        self.model, self.options = model, options
        constraints = model.tokenizer is not None and bool(model.eos_ids)
        self._given, self._warm_up = replace(options.engine, constraints=constraints), warm_up
        self.engine = Engine(model, self._given, warm_up=warm_up)
        self.metrics = Metrics(lambda: self.engine.meter)
        self.started = int(time.time())
        self.stopping = False
        self._native: Engine | None = None
        self._making = threading.Lock()
        self._open: set[Running] = set()

    @property
    def drafts(self) -> list[str]:
        """The ways to draft that a request may ask for."""
        own = self.options.engine
        if not own.gamma:
            return ["none"]
        if not own.window:
            return ["native", "none"]
        return ["windowed", "native", "none"] if self.options.compare else ["windowed", "none"]

    def card(self) -> ModelCard:
        """What the server says about its model."""
        context = self.engine.room(0) + self.engine.gamma + 1
        return ModelCard(id=self.options.name, created=self.started, context=context, drafts=self.drafts)

    def require_model(self, name: str) -> None:
        """Raises ApiError for a model that is not served."""
        if name != self.options.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; {self.options.name!r} is",
                param="model",
                code="model_not_found",
            )

    async def complete(self, request: CompletionRequest) -> tuple[Format, list[Choice]]:
        """Submits a completion's choices. Raises ApiError."""
        given = request.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        prompts: list[Any] = [given] if single else list(given)
        limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        made = CompletionFormat(
            self.model, self.options.name, request.logprobs is not None, bool(request.draft_details)
        )
        return made, await self._submit(request, prompts, limit, request.logprobs, "prompt")

    async def chat(self, request: ChatRequest) -> tuple[Format, list[Choice]]:
        """Submits a chat's choices. Raises ApiError."""
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        turns = [_turn(message) for message in request.messages]
        try:
            prompt = await run_in_threadpool(self.model.encode_chat, turns, request.chat_template_kwargs)
        except UserError as error:
            message = str(error).replace("leave --chat out", "use /v1/completions")
            raise ApiError(400, message, param="messages") from None
        limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
        if limit is None:
            limit = max(1, self.engine.room(len(prompt)))
        wanted = (request.top_logprobs or 0) if request.logprobs else None
        made = ChatFormat(self.model, self.options.name, bool(request.logprobs), bool(request.draft_details))
        return made, await self._submit(request, [prompt], limit, wanted, "messages")

    async def whole(self, made: Format, choices: Sequence[Choice]) -> BaseModel:
        """The answer once every choice has ended. Raises ApiError."""
        try:
            async with contextlib.aclosing(events(choices)) as coming:
                async for _ in coming:
                    pass
        except Exception as error:
            raise api_error(error) from error
        finally:
            self._release(choices)
        return made.whole(choices)

    async def chunks(self, made: Format, choices: Sequence[Choice], *, count: bool) -> AsyncGenerator[BaseModel, None]:
        """The answer in pieces; a failure is the last of them."""
        try:
            for choice in choices:
                begin = made.begin(choice)
                if begin is not None:
                    yield begin
            async with contextlib.aclosing(events(choices)) as coming:
                async for choice, event in coming:
                    yield made.chunk(choice, event)
            for choice in choices:
                if not choice.events or choice.events[-1].finished is None:
                    yield made.end(choice)
            if count:
                yield made.counts(choices)
        except Exception as error:
            yield api_error(error).body
        finally:
            self._release(choices)

    def cut_short(self) -> None:
        """Ends every running text where it stands; each is answered with what there is of it."""
        for running in list(self._open):
            running.cancel()

    def close(self) -> None:
        """Ends the engines and all that runs in them."""
        self.stopping = True
        for engine in (self.engine, self._native):
            if engine is not None:
                engine.close(finish=False)

    async def _submit(
        self,
        request: GenerationRequest,
        prompts: Sequence[Any],
        limit: int,
        logprobs: int | None,
        prompt_field: str,
    ) -> list[Choice]:
        arrived, number = time.monotonic(), request.n or 1
        if len(prompts) * number > self.options.choices:
            what = f"{len(prompts)} prompts times n={number}"
            field = "n" if number > 1 else prompt_field
            raise ApiError(400, f"{field}: {what} are more than {self.options.choices} choices", param=field)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
        given = self._engine_options(request) | dict(max_new_tokens=limit, logprobs=logprobs)
        # No seed: another text each time, and another for each choice.
        seed = secrets.randbits(32) if request.seed is None else request.seed
        choices: list[Choice] = []
        try:
            engine = await self._engine(request)
            for prompt in prompts:
                for _ in range(number):
                    own = (seed + len(choices)) % 2**32
                    running = await run_in_threadpool(engine.submit, prompt, seed=own, **given)
                    self._open.add(running)
                    choices.append(Choice(len(choices), running, prompt, engine.gamma, arrived))
        except Exception as error:
            self._release(choices)
            raise api_error(error, prompt_field) from error
        except asyncio.CancelledError:
            self._release(choices)
            raise
        return choices

    def _engine_options(self, request: GenerationRequest) -> dict[str, Any]:
        options: dict[str, Any] = {
            name: getattr(request, name) for name in _SAME_NAME if getattr(request, name) is not None
        }
        options["temperature"] = 1.0 if request.temperature is None else request.temperature
        if request.stop is not None:
            options["stop"] = request.stop
        if request.gamma is not None:
            options["gamma"] = request.gamma
        if request.draft == "none":
            options["gamma"] = 0
        form = request.response_format
        if isinstance(form, JsonObjectFormat):
            options["constraint"] = Constraint(json_schema={"type": "object"})
        elif isinstance(form, JsonSchemaFormat):
            options["constraint"] = Constraint(json_schema=form.json_schema.schema_)
        elif isinstance(form, RegexFormat):
            options["constraint"] = Constraint(regex=form.regex)
        return options

    async def _engine(self, request: GenerationRequest) -> Engine:
        if request.draft is not None and request.draft not in self.drafts:
            raise ApiError(400, f"draft: this server has {', '.join(self.drafts)}, not {request.draft}", param="draft")
        if request.draft == "native" and self.options.engine.window:
            return await run_in_threadpool(self._native_engine)
        return self.engine

    def _native_engine(self) -> Engine:
        """The engine whose drafts see everything, made when it is first asked for."""
        with self._making:
            if self.stopping:
                raise ApiError(503, "the server is stopping", kind="server_error")
            if self._native is None:
                options = replace(self._given, rows=1, pages=None, window=0, sink=None, prefix_bytes=0)
                self._native = Engine(self.model, options, warm_up=self._warm_up)
            return self._native

    def _release(self, choices: Sequence[Choice]) -> None:
        """Whatever has not ended is of no more use to anyone."""
        for choice in choices:
            self._open.discard(choice.running)
            if choice.running.finished is None:
                choice.running.cancel()
            waits = choice.waits()
            if waits is not None:
                self.metrics.generated(*waits)


def _turn(message: Any) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    # Templates know no other name for who instructs the model.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({"name": message.name} if message.name is not None else {})
