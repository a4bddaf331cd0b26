"""The page of `cpt chat --browser` in a real Chromium that may reach this machine only: typed, sent, streamed, stopped, narrow and dark."""

import os
import shutil
import time

import pytest
from playwright.sync_api import expect, sync_playwright
from tiny_checkpoints import save_llama

from cpt.serving.answering import Sampling
from cpt.serving.browser import page_at
from cpt.serving.chat import free_port
from cpt.serving.sides import load_sides

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 400, "height": 800}
SECONDS_A_TOKEN = 0.02
PROMPT = "the model reads"


@pytest.fixture(scope="module")
def chromium():
    path = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(f"no Chromium: install one, or name it in the variable CHROMIUM. Looked for {', '.join(NAMES)}.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--headless", "--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tokenizer_folder, tmp_path_factory):
    """Two models without a template that take their time, so that an answer can be watched and stopped."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in ((1, "base"), (2, "trained")):
        (save_llama(folder / name, tokenizer_folder, seed=seed, max_position_embeddings=600) / "chat_template.jinja").unlink()
    sides = load_sides(str(folder / "trained"), str(folder / "base"))
    for side in sides:
        side.model.register_forward_pre_hook(lambda *_: time.sleep(SECONDS_A_TOKEN))
    with page_at(sides, port=free_port(), sampling=Sampling(temperature=0, max_new_tokens=8)) as url:
        yield url


@pytest.fixture
def opened(chromium, address):
    """Opens the page in a tab of its own; what it asked for besides, and what it complained of, come with it."""
    contexts = []

    def open_it(viewport=WIDE, **options):
        context = chromium.new_context(viewport=viewport, **options)
        contexts.append(context)
        asked, complaints = [], []
        context.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#prompt textarea")
        return page, asked, complaints

    yield open_it
    for context in contexts:
        context.close()


def ask(page, text=PROMPT, tokens=8):
    page.locator("input[aria-label*='Length']").first.fill(str(tokens))
    page.locator("#prompt textarea").fill(text)
    page.locator("#send").click()


def answer(page, side):
    return page.locator(f"#side-{side} .bot")


def test_both_answers_come_and_nothing_is_asked_of_another_machine(opened, address):
    page, asked, complaints = opened()
    expect(page.locator("#notice")).to_contain_text("The base model and the trained model have no chat template: they continue text")
    ask(page)
    for side in (0, 1):
        expect(page.locator(f"#side-{side} .user")).to_contain_text(PROMPT)
        expect(answer(page, side)).not_to_be_empty()
    assert asked and all(url.startswith((address, "data:")) for url in asked)
    assert complaints == []


def test_an_answer_grows_while_it_is_watched_and_stop_ends_both(opened):
    page, _, _ = opened()
    ask(page, tokens=500)
    expect(answer(page, 0)).not_to_be_empty()
    begun = len(answer(page, 0).inner_text())
    page.wait_for_function("begun => document.querySelector('#side-0 .bot').innerText.length > begun + 20", arg=begun)
    page.locator("#stop").click()
    page.wait_for_timeout(10 * SECONDS_A_TOKEN * 1000)
    ended = answer(page, 0).inner_text()
    page.wait_for_timeout(20 * SECONDS_A_TOKEN * 1000)
    assert answer(page, 0).inner_text() == ended
    expect(answer(page, 1)).to_have_count(0)


def test_retry_gives_an_answer_in_place_of_the_last_and_clear_empties_the_page(opened):
    page, _, _ = opened()
    ask(page)
    expect(answer(page, 1)).not_to_be_empty()
    page.locator("#retry").click()
    expect(page.locator("input[aria-label*='Seed']")).to_have_value("1")
    expect(answer(page, 1)).not_to_be_empty()
    assert page.locator("#side-1 .user").count() == 1
    page.locator("#clear").click()
    expect(page.locator("#side-0 .user, #side-1 .user")).to_have_count(0)


def test_what_cannot_be_answered_is_told_on_the_page(opened):
    page, _, _ = opened()
    ask(page, text="the model reads a document " * 200)
    expect(page.locator("#problem")).to_contain_text("and the model knows 600 positions. Shorten it, or clear.")
    ask(page, text="")
    expect(page.locator("#problem")).to_contain_text("write something")


def test_a_tab_that_is_reloaded_in_the_middle_is_answered_anew(opened):
    page, _, _ = opened()
    ask(page, tokens=500)
    expect(answer(page, 0)).not_to_be_empty()
    page.reload()
    page.wait_for_selector("#prompt textarea")
    ask(page)
    expect(answer(page, 1)).not_to_be_empty(timeout=5000)  # the first answer would take longer than that


def test_tabs_wait_for_each_other(opened):
    (first, *_), (second, *_) = opened(), opened()
    ask(first, tokens=40)
    ask(second, text="which word", tokens=8)
    for page, text in ((first, PROMPT), (second, "which word")):
        expect(answer(page, 1)).not_to_be_empty()
        expect(page.locator("#side-1 .user")).to_contain_text(text)


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}])
def test_a_narrow_screen_is_not_overflowed(opened, options):
    page, _, _ = opened(NARROW, **options)
    ask(page)
    expect(answer(page, 1)).not_to_be_empty()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    boxes = [page.locator(f"#side-{side}").bounding_box() for side in (0, 1)]
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]  # one below the other


def test_the_page_follows_the_theme(opened):
    grounds = [
        page.evaluate("getComputedStyle(document.body).backgroundColor") for page in (opened()[0], opened(WIDE, color_scheme="dark")[0])
    ]
    light, dark = (sum(int(part) for part in ground[4:-1].split(",")) for ground in grounds)
    assert light > 600 and dark < 150
