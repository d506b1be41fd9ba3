"""From a checked body to an answer: what a request asks of which engine, and what becomes of it."""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from wmtp_jax.engine.engine import Engine, EngineClosed
from wmtp_jax.engine.task import Task
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.serve.answers import ModelCard
from wmtp_jax.serve.choices import Choice, events
from wmtp_jax.serve.errors import ApiError, api_error
from wmtp_jax.serve.formats import ChatFormat, CompletionFormat, Format
from wmtp_jax.serve.metrics import Metrics
from wmtp_jax.serve.options import ServeOptions
from wmtp_jax.serve.racing import unless
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
        # Of the loop that serves.
        self.told_to_stop, self.cut = asyncio.Event(), asyncio.Event()
        self._engines = [self.engine]
        self._changing = threading.Lock()
        self._native: asyncio.Future[Engine] | None = None

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
        return ModelCard(id=self.options.name, created=self.started, context=self.engine.room(0), drafts=self.drafts)

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
        arrived, given = time.monotonic(), request.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        prompts: list[Any] = [given] if single else list(given)
        limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        made = CompletionFormat(
            self.model, self.options.name, request.logprobs is not None, bool(request.draft_details)
        )
        asked = _Asked(prompts, limit, request.logprobs, arrived, "prompt")
        return made, await self._submit(request, asked)

    async def chat(self, request: ChatRequest) -> tuple[Format, list[Choice]]:
        """Submits a chat's choices. Raises ApiError."""
        arrived = time.monotonic()
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        turns = [_turn(message) for message in request.messages]
        try:
            self.engine.require_short("".join(turn["content"] for turn in turns))
        except UserError as error:
            raise api_error(error, "messages") from None
        try:
            prompt = await run_in_threadpool(self.model.encode_chat, turns, request.chat_template_kwargs)
        except UserError as error:
            message = str(error).replace("leave --chat out", "use /v1/completions")
            raise ApiError(400, message, param="messages") from None
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        if limit is None:
            limit = max(1, self.engine.room(len(prompt)))
        wanted = (request.top_logprobs or 0) if request.logprobs else None
        made = ChatFormat(self.model, self.options.name, bool(request.logprobs), bool(request.draft_details))
        return made, await self._submit(request, _Asked([prompt], limit, wanted, arrived, "messages"))

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
            if count:
                yield made.counts(choices)
        except Exception as error:
            yield api_error(error).body
        finally:
            self._release(choices)

    def stop(self) -> None:
        """Takes no more requests, not even what is still on its way; may be called again."""
        self.stopping = True
        self.told_to_stop.set()

    def cut_short(self) -> None:
        """Ends every running text where it stands; each is answered with what there is of it."""
        self.cut.set()
        for engine in self._engines:
            engine.cut_short()

    def close(self) -> None:
        """Ends the engines and all that runs in them."""
        with self._changing:
            self.stopping = True
        for engine in self._engines:
            engine.close(finish=False)

    async def _submit(self, request: GenerationRequest, asked: "_Asked") -> list[Choice]:
        number = request.n or 1
        if len(asked.prompts) * number > self.options.choices:
            what = f"{len(asked.prompts)} prompts times n={number}"
            field = "n" if number > 1 else asked.prompt_field
            raise ApiError(400, f"{field}: {what} are more than {self.options.choices} choices", param=field)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
        choices: list[Choice] = []
        try:
            engine = await self._engine(request)
            # Only this can take long, and whoever leaves meanwhile leaves nothing behind.
            tasks = await run_in_threadpool(self._prepare, engine, request, asked, number)
            for index, task in enumerate(tasks):
                choices.append(Choice(index, engine.start(task), index // number, engine.gamma, asked.arrived))
        except Exception as error:
            self._release(choices)
            raise api_error(error, asked.prompt_field) from error
        return choices

    def _prepare(self, engine: Engine, request: GenerationRequest, asked: "_Asked", number: int) -> list[Task]:
        given = self._engine_options(request) | dict(max_new_tokens=asked.limit, logprobs=asked.logprobs)
        # No seed: another text each time, and another for each choice.
        seed = secrets.randbits(32) if request.seed is None else request.seed
        tasks: list[Task] = []
        for index, prompt in enumerate(asked.prompts):
            try:
                # Once for all its choices. One without a token is the engine's to refuse.
                ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
                for _ in range(number):
                    tasks.append(engine.prepare(ids or prompt, seed=(seed + len(tasks)) % 2**32, **given))
            except UserError as error:
                raise _of_prompt(error, index, len(asked.prompts)) from None
        return tasks

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
            return await self._native_engine()
        return self.engine

    async def _native_engine(self) -> Engine:
        """The engine whose drafts see everything, made when it is first asked for; all who ask wait for one."""
        if self._native is None:
            self._native = asyncio.ensure_future(run_in_threadpool(self._make_native))
        try:
            # Its compilation cannot be stopped, but need not be waited for.
            made = await unless(self.cut, asyncio.shield(self._native))
        except Exception:
            self._native = None
            raise
        if made is None:
            raise EngineClosed("the server is stopping")
        return made

    def _make_native(self) -> Engine:
        options = replace(self._given, rows=1, pages=None, window=0, sink=None, prefix_bytes=0)
        engine = Engine(self.model, options, warm_up=self._warm_up)
        with self._changing:
            if not self.stopping:
                self._engines.append(engine)
                return engine
        engine.close()
        raise EngineClosed("the server is stopping")

    def _release(self, choices: Sequence[Choice]) -> None:
        """Whatever has not ended is of no more use to anyone."""
        for choice in choices:
            if choice.running.finished is None:
                choice.running.cancel()
            waits = choice.waits()
            if waits is not None:
                self.metrics.generated(*waits)


class _Asked(NamedTuple):
    """What a request comes to, of either kind: texts or token ids, and new tokens for each."""

    prompts: Sequence[Any]
    limit: int
    logprobs: int | None
    arrived: float
    prompt_field: str


def _of_prompt(error: UserError, index: int, prompts: int) -> UserError:
    """The engine's error, which knows of one prompt, as that of one among several."""
    one = "the prompt" if prompts == 1 else f"prompt {index}"
    return type(error)(str(error).replace("prompt 0", one, 1).replace("the prompt", one, 1), field=error.field)


def _turn(message: Any) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    # Templates know no other name for who instructs the model.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({"name": message.name} if message.name is not None else {})
