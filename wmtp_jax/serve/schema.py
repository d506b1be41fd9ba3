"""Bodies of requests, as the OpenAI API has them, with this server's additions.

What is sent is checked to the letter: a wrong type or range, and a field that would change the answer but is not
supported, are errors that name the field. Null stands for a field's default.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from wmtp_jax.decode.sampling import MOST_LIKELY
from wmtp_jax.decode.sampling_params import REPETITION_PENALTIES
from wmtp_jax.generation.options import MAX_GAMMA
from wmtp_jax.serve.options import Draft

_NonEmpty = Annotated[str, StringConstraints(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_MOST_TOKENS = 2**30
_Nothing = Annotated[list[Any], Field(max_length=0)]


_MOST_ENTRIES = 64


def _few(given: Any) -> Any:
    """Told before entries are looked at: errors of a hundred thousand wrong ones take seconds."""
    if isinstance(given, dict) and len(given) > _MOST_ENTRIES:
        raise ValueError(f"has more than {_MOST_ENTRIES} entries")
    return given


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _require_few(cls, given: Any) -> Any:
        return _few(given)


class StreamOptions(_Strict):
    """``include_usage`` adds a last chunk with the counts of tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Strict):
    """A named schema that the text must fit."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(_Strict):
    """Text all of which matches a regular expression; an addition of this server."""

    type: Literal["regex"]
    regex: str = Field(min_length=1, max_length=10_000)


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat, Field(discriminator="type")]


class GenerationRequest(_Strict):
    """What both kinds of completion share. From ``top_k`` to ``draft_details`` are additions of this server."""

    model: str
    max_tokens: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _NonEmpty | Annotated[list[_NonEmpty], Field(max_length=16, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=0, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=1e-9, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: ResponseFormat | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])
    ignore_eos: bool | None = None
    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA, description="At most so many drafts a step.")
    draft: Draft | None = Field(None, description="Who drafts. The text is the same whoever does.")
    draft_details: bool | None = Field(None, description="Say which tokens were drafted, and how well.")
    # Taken and not used: they change nothing about the text.
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few), Field(max_length=_MOST_ENTRIES)] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Of what is not supported, that there is none of it.
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    tools: _Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    """A text, or token ids, to continue; or several of either."""

    # An error for each of a million wrong items would be more than the items: the first is enough.
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
        ]
    )
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None


class TextPart(_Strict):
    """A piece of a turn."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None
    # An answer as clients hand it back: what was not in it may be said to be nothing.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: _Nothing | None = None
    annotations: _Nothing | None = None


class ChatRequest(GenerationRequest):
    """A conversation to go on with, by the checkpoint's chat template.

    ``chat_template_kwargs`` are variables for the template.
    """

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    chat_template_kwargs: dict[str, Any] | None = None
