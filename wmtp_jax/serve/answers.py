"""Bodies of answers, as the OpenAI API has them. What was not asked for is left out."""

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    """``param`` names the field that is wrong, where it is one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every failure has this form."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Prompt tokens that an earlier request had read."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Drafts(BaseModel):
    """How drafting went for one choice; an addition of this server.

    ``step_ms`` is the median time between two reads of what was emitted, divided by their steps; others that ran
    beside it are in it. ``acceptance_by_position`` tells how often each draft was right where those before it were.
    """

    steps: int
    acceptance_length: float | None = None
    acceptance_by_position: list[float | None]
    step_ms: float | None = None


class TokenDraft(BaseModel):
    """A token's text, and whether it was drafted; a step's last token counts as the target's own."""

    text: str
    drafted: bool


class CompletionLogprobs(BaseModel):
    """A list each, with an entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _Choice(BaseModel):
    index: int
    finish_reason: FinishReason | None = None
    drafts: Drafts | None = None
    tokens: list[TokenDraft] | None = None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class TopLogprob(BaseModel):
    """``bytes`` are null where the token is no whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class _Body(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = None


class Completion(_Body):
    """A whole text completion, and each chunk of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(_Body):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(_Body):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class ModelCard(BaseModel):
    """``context`` is what a request's prompt and new tokens together may be."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "wmtp"
    context: int
    drafts: list[str] = Field(description="What a request may give as `draft`.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "stopping"]


def to_json(body: BaseModel) -> dict[str, Any]:
    """What clients of the API expect: no nulls but a choice's ``finish_reason``, where it is still to come."""
    made = body.model_dump(exclude_none=True)
    for choice in made.get("choices", ()):
        choice.setdefault("finish_reason", None)
    return made
