"""The page of `cpt chat --browser` in a real Chromium that may reach this machine only: typed, sent, streamed,
stopped, narrow and dark."""

import time

import pytest
from chromium_here import open_chromium
from playwright.sync_api import expect
from tiny_checkpoints import save_llama

from cpt.serving.answering import Sampling
from cpt.serving.browser import page_at
from cpt.serving.chat import free_port
from cpt.serving.sides import load_sides

pytestmark = pytest.mark.browser
SECONDS_A_TOKEN, MOST_SECONDS = 0.02, 60
MANY = 500
PROMPT = "the model reads"
expect.set_options(timeout=MOST_SECONDS * 1000)


@pytest.fixture(scope="module")
def chromium():
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def written():
    """A number for each token that a model made."""
    return []


@pytest.fixture(scope="module")
def address(tokenizer_folder, tmp_path_factory, written):
    """Two models without a template that take their time, so that an answer can be watched and stopped."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in ((1, "base"), (2, "trained")):
        (
            save_llama(folder / name, tokenizer_folder, seed=seed, max_position_embeddings=600) / "chat_template.jinja"
        ).unlink()
    sides = load_sides(str(folder / "trained"), str(folder / "base"))

    def take_time(*_):
        written.append(len(written))
        time.sleep(SECONDS_A_TOKEN)

    for side in sides:
        side.model.register_forward_pre_hook(take_time)
    with page_at(sides, port=free_port(), sampling=Sampling(temperature=0, max_new_tokens=8)) as url:
        yield url


class Tab:
    """The page in a tab of its own; what it asked for besides, and what it complained of."""

    def __init__(self, context, address):
        self.asked, self.complaints = [], []
        context.set_default_timeout(MOST_SECONDS * 1000)
        context.route(lambda url: not url.startswith(address), lambda route: route.abort())
        self.page = context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector("#prompt textarea")

    def ask(self, text=PROMPT, tokens=8):
        self.page.locator("input[aria-label*='Length']").first.fill(str(tokens))
        self.page.locator("#prompt textarea").fill(text)
        self.page.locator("#send").click()

    def answer(self, side):
        return self.page.locator(f"#side-{side} .bot-row .bot.message")

    def ground(self):
        red, green, blue = (
            int(part)
            for part in self.page.evaluate("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
        )
        return red + green + blue


@pytest.fixture(scope="module")
def open_tab(chromium, address):
    contexts = []

    def open_it():
        contexts.append(chromium.new_context(viewport={"width": 1200, "height": 900}))
        return Tab(contexts[-1], address)

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def used_tab(open_tab):
    return open_tab()


@pytest.fixture
def tab(used_tab):
    """One tab for most tests, wide and light: opening one takes longer than what is done in it."""
    yield used_tab
    used_tab.page.locator("#clear").click()
    expect(used_tab.page.locator("#side-0 .user, #side-1 .user")).to_have_count(0)
    used_tab.page.set_viewport_size({"width": 1200, "height": 900})
    used_tab.page.emulate_media(color_scheme="light")


def test_both_answers_come_and_nothing_is_asked_of_another_machine(tab, address):
    expect(tab.page.locator("#notice")).to_contain_text("These models have no chat template: text is continued")
    tab.ask()
    for side in (0, 1):
        expect(tab.page.locator(f"#side-{side} .user.message")).to_contain_text(PROMPT)
        expect(tab.answer(side)).not_to_be_empty()
    assert tab.asked and all(url.startswith((address, "data:")) for url in tab.asked)
    assert tab.complaints == []


def test_an_answer_grows_while_it_is_watched_and_stop_ends_both(tab, written):
    first = len(written)
    tab.ask(tokens=MANY)
    expect(tab.answer(0)).not_to_be_empty()
    begun = len(tab.answer(0).inner_text())
    tab.page.wait_for_function(
        "begun => document.querySelector('#side-0 .bot-row .bot.message').innerText.length > begun + 10", arg=begun
    )
    tab.page.locator("#stop").click()
    expect(tab.page.locator("#side-0 .bot-row [aria-label='Copy message']")).to_have_count(
        1
    )  # comes when the answer has ended
    assert len(written) - first < MANY
    tab.ask()
    expect(tab.answer(0)).to_have_count(2)
    expect(tab.answer(1)).to_have_count(1)


def test_retry_gives_an_answer_in_place_of_the_last(tab):
    tab.ask()
    expect(tab.answer(1)).not_to_be_empty()
    tab.page.locator("#retry").click()
    expect(tab.page.get_by_label("Seed")).to_have_value("1")
    expect(tab.answer(1)).not_to_be_empty()
    assert tab.page.locator("#side-1 .user.message").count() == 1


def test_what_cannot_be_answered_is_told_on_the_page(tab):
    tab.ask("the model reads a document " * 200)
    expect(tab.page.locator("#problem")).to_contain_text("and the model knows 600 positions. Shorten it, or clear.")
    tab.ask("")
    expect(tab.page.locator("#problem")).to_contain_text("write something")


def test_a_narrow_screen_is_not_overflowed(tab):
    tab.page.set_viewport_size({"width": 400, "height": 800})
    tab.ask()
    expect(tab.answer(1)).not_to_be_empty()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400
    first, second = (tab.page.locator(f"#side-{side}").bounding_box() for side in (0, 1))
    assert second["y"] >= first["y"] + first["height"]  # one below the other


def test_the_page_follows_the_theme(tab):
    assert tab.ground() > 600
    tab.page.emulate_media(color_scheme="dark")
    tab.page.wait_for_function("document.body.classList.contains('dark')")
    assert tab.ground() < 150


def test_a_tab_that_is_reloaded_in_the_middle_ends_its_answer_and_tabs_wait_for_each_other(open_tab, tab, written):
    reloaded = open_tab()
    first = len(written)
    reloaded.ask(tokens=MANY)
    tab.ask("which word")  # waits
    expect(reloaded.answer(0)).not_to_be_empty()
    assert tab.answer(0).count() == 0
    reloaded.page.reload()
    expect(tab.answer(1)).not_to_be_empty()
    expect(tab.page.locator("#side-1 .user.message")).to_contain_text("which word")
    assert len(written) - first < MANY
    reloaded.ask()
    expect(reloaded.answer(1)).not_to_be_empty()
