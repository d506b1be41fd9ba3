"""The page in a real browser: what a person sees is what the library writes."""

import shutil
from collections.abc import Iterator

import pytest

import wmtp_jax as wmtp
from tests.serve.serving import Serving, chat_model, serving

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a `chromium` on the path, as Debian's package has it")
MOST = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    made = browser.new_page()
    made.failures = []
    made.on("pageerror", lambda error: made.failures.append(str(error)))
    made.on("console", lambda line: made.failures.append(line.text) if line.type == "error" else None)
    yield made
    made.close()


def ask(page, prompt: str, tokens: int, button: str = "#run", runs: int = 1) -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", "1")
    # Of the first ones, the one with the longest text.
    page.fill("#seed", "11")
    page.click(button)
    ended = "n => document.querySelectorAll('.run[data-finished]').length === n"
    page.wait_for_function(ended, arg=runs, timeout=MOST)
    page.wait_for_selector("#run:enabled", timeout=MOST)


def test_text_streams_with_its_drafts_marked(server, page):
    page.goto(server.url)
    page.wait_for_selector("#draft option[value=windowed]", state="attached", timeout=MOST)
    assert page.text_content("#model") == "tiny"
    ask(page, "abc,12:", 40)
    given = dict(temperature=1.0, seed=11, max_new_tokens=40, page_size=64, chunk=16)
    expected = wmtp.generate(chat_model(), "abc,12:", gamma=0, **given)
    assert page.text_content(".run .text") == expected.text[0]
    assert page.locator(".run .drafted").count() > 0
    below = page.text_content(".run .figures")
    assert f"{len(expected.tokens[0])} tokens in" in below
    for figure in ("acceptance length", "accepted by position", "ms a step"):
        assert figure in below
    assert page.failures == []


def test_native_against_windowed_writes_the_same_text(server, page):
    page.goto(server.url)
    page.wait_for_selector("#compare:not([hidden])", timeout=MOST)
    ask(page, "abc,12:", 30, "#compare", runs=2)
    assert page.locator(".run .title").all_text_contents() == ["native", "windowed"]
    native, windowed = page.locator(".run .text").all_text_contents()
    assert native == windowed != ""
    assert page.text_content("#same") == "Both wrote the same text."
    assert page.failures == []


def test_markup_in_a_text_is_text(server, page):
    page.goto(server.url)
    page.wait_for_selector("#draft option", state="attached", timeout=MOST)
    page.evaluate(
        """() => { window.fetch = async () => new Response(
        'data: {"choices":[{"text":"","tokens":[{"text":"<img src=x onerror=alert(1)>","drafted":true}],' +
        '"finish_reason":"stop"}]}\\n\\ndata: [DONE]\\n\\n'); }"""
    )
    ask(page, "a", 5)
    assert page.text_content(".run .text") == "<img src=x onerror=alert(1)>"
    assert page.locator(".run img").count() == 0


def test_what_is_wrong_is_shown(server, page):
    page.goto(server.url)
    page.wait_for_selector("#draft option", state="attached", timeout=MOST)
    ask(page, "a" * 50, 40)
    assert "this engine holds 64 a request" in page.text_content(".run .error")


def test_a_text_can_be_stopped(page):
    from tests.serve.serving import assert_idle
    from tests.serve.test_lifecycle import SLOW

    with serving(SLOW) as server:
        page.goto(server.url)
        page.wait_for_selector("#draft option", state="attached", timeout=MOST)
        page.fill("#tokens", "4000")
        page.fill("#temperature", "1")
        page.click("#run")
        page.wait_for_selector(".run .text span", timeout=MOST)
        page.click("#stop")
        page.wait_for_selector(".run[data-finished]", timeout=MOST)
        assert_idle(server)


def test_a_key_is_asked_for(page):
    with serving(api_key="k1") as server:
        page.goto(server.url)
        page.wait_for_selector("#key-label:not([hidden])", timeout=MOST)
        assert "the API key is missing or wrong" in page.text_content("#same")
        page.fill("#key", "k1")
        page.press("#key", "Tab")
        page.wait_for_selector("#draft option", state="attached", timeout=MOST)
        ask(page, "abc,12:", 5)
        assert "acceptance length" in page.text_content(".run .figures")
