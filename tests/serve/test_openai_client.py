"""The official client against a server: what it gets is what the library writes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import wmtp_jax as wmtp
from tests.serve.serving import NAME, Serving, assert_idle, chat_model, serving

PROMPT = "abc,12:"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    assert_idle(server)


def written(prompt: str, **options: Any) -> tuple[str, str]:
    """What the library writes without drafts, and why it ends."""
    out = wmtp.generate(chat_model(), prompt, gamma=0, page_size=64, chunk=16, **options)
    return out.text[0], "length" if out.finished[0] == "length" else "stop"


@pytest.mark.parametrize(
    "options",
    [
        dict(max_tokens=20, temperature=0),
        dict(max_tokens=25, temperature=0.9, seed=3),
        dict(max_tokens=25, temperature=1.2, top_p=0.8, seed=4, frequency_penalty=0.5, presence_penalty=-0.2),
        dict(max_tokens=40, temperature=1.0, seed=5, stop=["a", ":"]),
        dict(max_tokens=40, temperature=1.0, seed=6, stop="b"),
        dict(max_tokens=1, temperature=0),
        dict(max_tokens=0, temperature=0),
    ],
)  # fmt: skip
def test_completions_are_what_the_library_writes_whole_and_streamed(client, options):
    library = {name: value for name, value in options.items() if name != "max_tokens"}
    text, finished = written(PROMPT, max_new_tokens=options["max_tokens"], **library)
    whole = client.completions.create(model=NAME, prompt=PROMPT, **options)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, finished)
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert whole.usage.completion_tokens <= options["max_tokens"]
    chunks = list(client.completions.create(model=NAME, prompt=PROMPT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [finished]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_usual_numbers_of_new_tokens(client):
    assert client.completions.create(model=NAME, prompt="a", temperature=0).usage.completion_tokens <= 16
    turns = [dict(role="user", content="a")]
    answer = client.chat.completions.create(model=NAME, messages=turns, temperature=0, extra_body=dict(ignore_eos=True))
    # All the room there is: 64 positions, of which drafts need 4.
    assert answer.usage.total_tokens == 60
    assert answer.choices[0].finish_reason == "length"


def test_chat_by_the_checkpoints_template(client):
    turns = [
        dict(role="developer", content="be brief"),
        dict(role="user", content=[dict(type="text", text="ab"), dict(type="text", text="c")]),
        dict(role="assistant", content="d"),
        dict(role="user", content="e"),
    ]
    prompt = "s:be brief,u:abc,a:d,u:e,"
    options = dict(temperature=0.7, seed=9)
    expected = written(prompt, max_new_tokens=18, **options)
    given = dict(model=NAME, messages=turns, max_completion_tokens=18, **options)
    (choice,) = client.chat.completions.create(**given).choices
    assert (choice.message.content, choice.finish_reason) == expected
    assert choice.message.role == "assistant"
    chunks = list(client.chat.completions.create(stream=True, **given))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[0]
    assert chunks[-1].choices[0].finish_reason == expected[1]
    other = client.chat.completions.create(**given, extra_body=dict(chat_template_kwargs=dict(ending="zz")))
    assert other.choices[0].message.content == written(prompt + "zz", max_new_tokens=18, **options)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_and_several_prompts(client, stream):
    prompts = ["ab", [4, 5, 6], "c1"]
    with pytest.raises(openai.BadRequestError, match="prompt: must be text, token ids, or a list of either"):
        client.completions.create(model=NAME, prompt=prompts)
    options = dict(temperature=1.0, seed=11, max_tokens=12)
    given = dict(model=NAME, prompt=["ab", "c1"], n=3, **options)
    expected = [
        written(prompt, max_new_tokens=12, temperature=1.0, seed=11 + 3 * index + choice)
        for index, prompt in enumerate(("ab", "c1"))
        for choice in range(3)
    ]
    if stream:
        texts, reasons = [""] * 6, [""] * 6
        for chunk in client.completions.create(stream=True, stream_options=dict(include_usage=True), **given):
            if not chunk.choices:
                usage = chunk.usage
            for choice in chunk.choices:
                assert not reasons[choice.index], "text after the end"
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or ""
        assert list(zip(texts, reasons, strict=True)) == expected
    else:
        answer = client.completions.create(**given)
        usage = answer.usage
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == expected
    assert usage.prompt_tokens == 4
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_without_a_seed_every_text_is_another(client):
    given = dict(model=NAME, prompt=PROMPT, max_tokens=20, n=4, extra_body=dict(ignore_eos=True))
    texts = {choice.text for _ in range(2) for choice in client.completions.create(**given).choices}
    assert len(texts) == 8


def test_logprobs_of_completions(client):
    given = dict(model=NAME, prompt=PROMPT, max_tokens=15, temperature=0, logprobs=3)
    choice = client.completions.create(**given).choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) > 3
    for token, value, top, offset in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        # Greedy: each is the likeliest.
        assert value == max(top.values()) == top[token] < 0
        assert len(top) == 3
        if token != "<end>":
            assert choice.text[offset:].startswith(token)
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **given)]
    assert [token for piece in pieces for token in piece.tokens] == told.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == told.text_offset
    values = [value for piece in pieces for value in piece.token_logprobs]
    assert values == pytest.approx(told.token_logprobs, abs=1e-4)


def test_logprobs_of_chats(client):
    given = dict(model=NAME, messages=[dict(role="user", content="ab")], max_tokens=10, temperature=0.5, seed=1)
    content = client.chat.completions.create(logprobs=True, top_logprobs=2, **given).choices[0].logprobs.content
    assert len(content) > 2
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )
        assert token.logprob <= token.top_logprobs[0].logprob + 1e-6
    (choice,) = client.chat.completions.create(logprobs=True, **given).choices
    assert all(token.top_logprobs == [] for token in choice.logprobs.content)
    assert client.chat.completions.create(**given).choices[0].logprobs is None


@pytest.mark.parametrize("draft", ["windowed", "native", "none"])
def test_structured_output_fits_and_is_the_same_whoever_drafts(client, draft):
    schema = dict(
        type="object",
        properties=dict(a=dict(type="array", items=dict(type="integer"), maxItems=3), b=dict(enum=["c", "d"])),
        required=["a", "b"],
        additionalProperties=False,
    )
    form = dict(type="json_schema", json_schema=dict(name="ab", schema=schema, strict=True))
    given = dict(model=NAME, messages=[dict(role="user", content="x")], temperature=1.0, max_tokens=40)
    for seed in range(3):
        texts = {
            client.chat.completions.create(
                **given, seed=seed, response_format=form, extra_body=dict(draft=way)
            ).choices[0].message.content
            for way in ("none", draft)
        }  # fmt: skip
        (text,) = texts
        value = json.loads(text)
        assert set(value) == {"a", "b"}
        assert value["b"] in ("c", "d")
        assert all(type(item) is int for item in value["a"])


def test_json_objects_and_regular_expressions(client):
    given = dict(model=NAME, prompt="{", max_tokens=45, temperature=1.0, seed=2)
    choice = client.completions.create(**given, extra_body=dict(response_format=dict(type="json_object"))).choices[0]
    assert choice.text.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.text), dict)
    form = dict(type="regex", regex="[ab]{3}(1|2){2}")
    choice = client.completions.create(**given, extra_body=dict(response_format=form)).choices[0]
    assert choice.finish_reason == "stop"
    assert len(choice.text) == 5
    assert set(choice.text[:3]) <= set("ab")
    assert set(choice.text[3:]) <= set("12")


@pytest.mark.parametrize("draft", ["windowed", "native", "none"])
def test_drafts_are_told_and_change_nothing(client, draft):
    given = dict(model=NAME, prompt=PROMPT, max_tokens=30, temperature=0)
    answer = client.completions.create(**given, extra_body=dict(draft=draft, draft_details=True, ignore_eos=True))
    choice = answer.choices[0]
    expected = written(PROMPT, max_new_tokens=30, ignore_eos=True)[0]
    assert choice.text == "".join(token["text"] for token in choice.tokens) == expected
    drafts, drafted = choice.drafts, sum(token["drafted"] for token in choice.tokens)
    assert drafts["steps"] == 29 - drafted
    if draft == "none":
        assert drafted == 0
        assert drafts["acceptance_length"] == 1
    else:
        assert drafted > 0
        assert drafts["acceptance_length"] == pytest.approx(29 / drafts["steps"])
        assert len(drafts["acceptance_by_position"]) == 3
        assert drafts["step_ms"] > 0
    chunks = client.completions.create(
        **given, stream=True, extra_body=dict(draft=draft, draft_details=True, ignore_eos=True)
    )
    streamed = [token for chunk in chunks for token in chunk.choices[0].tokens]
    assert streamed == choice.tokens


def test_what_was_read_before_is_told(client):
    prompt = "edcba" * 8
    given = dict(model=NAME, prompt=prompt, max_tokens=2)
    assert client.completions.create(**given).usage.prompt_tokens_details.cached_tokens == 0
    assert client.completions.create(**given).usage.prompt_tokens_details.cached_tokens == 32


def test_models_and_what_they_are(client, server):
    (card,) = client.models.list().data
    assert card.id == NAME
    assert card.context == 60
    assert card.drafts == ["windowed", "native", "none"]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here; 'tiny' is"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client.completions.create(model="gpt", prompt="a")


def test_many_clients_at_once_get_their_own_texts(server):
    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(index: int) -> str:
                given = dict(model=NAME, prompt=f"a{index}", max_tokens=20, temperature=1.0, seed=index)
                if index % 2:
                    return (await client.completions.create(**given)).choices[0].text
                stream = await client.completions.create(stream=True, **given)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(index) for index in range(16)))

    texts = asyncio.run(everyone())
    for index, text in enumerate(texts):
        assert text == written(f"a{index}", max_new_tokens=20, temperature=1.0, seed=index)[0]
