"""The page of a whole run in a real Chromium, which may reach nothing but the file: plots, tables, the mouse, narrow
screens, darkness."""

from io import BytesIO

import numpy as np
import pytest
from chromium_here import open_chromium
from matplotlib.image import imread
from playwright.sync_api import expect

from cpt.report.record import read_record
from cpt.report.story import report_page

pytestmark = pytest.mark.browser
PLOTS = [
    *("Domain against general text", "Change of bits per byte", "Bits per byte of held-out text"),
    *("Difference from the base", "Training loss", "Learning rate", "Gradient norm", "Training loss of each source"),
    *(
        "Share of the tokens",
        "Share of the tokens so far",
        "Tokens per second",
        "Model FLOPs utilisation",
        "Waiting for data",
    ),
    *("Time of a step", "GPU memory", "Host memory", "Memory of one GPU"),
]
DARK, WIDE, NARROW = {"color_scheme": "dark"}, {"width": 1200, "height": 900}, {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def chromium():
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def file(write_run, tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "code")
    page = folder / "report.html"
    page.write_text(report_page(read_record(folder)))
    return page


@pytest.fixture
def opened(chromium, file):
    """Opens the file; what it asked for besides, and what it complained of, are in the page's `asked` and
    `complaints`."""
    contexts = []

    def open_it(viewport=WIDE, **options):
        context = chromium.new_context(viewport=viewport, **options)
        contexts.append(context)
        asked, complaints = [], []
        context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        return page, asked, complaints

    yield open_it
    for context in contexts:
        context.close()


def colors(page):
    """How many the screen shows."""
    red, green, blue = np.moveaxis(
        (255 * imread(BytesIO(page.screenshot(full_page=True)))[:, :, :3]).astype(np.int64), 2, 0
    )
    return len(np.unique((red * 256 + green) * 256 + blue))


def test_nothing_is_asked_of_any_network_and_nothing_is_complained_of(opened, file):
    _, asked, complaints = opened()
    assert asked == [file.as_uri()] and complaints == []


def test_each_plot_is_drawn_with_its_curves(opened):
    page, _, _ = opened()
    assert page.locator("figcaption").all_inner_texts() == PLOTS
    drawn = page.eval_on_selector_all(
        ".plot", "plots => plots.map(p => p.querySelectorAll('.js-line, .point, .points path').length)"
    )
    assert len(drawn) == len(PLOTS) and all(drawn)
    boxes = page.eval_on_selector_all(
        ".plot .main-svg:first-child", "all => all.map(one => one.getBoundingClientRect().height)"
    )
    assert len(boxes) == len(PLOTS) and min(boxes) > 100


def test_tables_have_their_cells(opened):
    page, _, _ = opened()
    cells = page.locator("td").all_inner_texts()
    for cell in ("-11.0 to -9.0 %", "code cloze", "0.050", "nan_skipped", "main():\n    pass", "CC0", "0.93"):
        assert cell in cells
    assert page.locator("table").count() == 8
    assert page.locator("dd").filter(has_text="commit 0123456789ab with uncommitted changes in 1 file").is_visible()


def hovered(page, title, across):
    """What the plot says under the mouse, at this share of its width."""
    area = page.locator("figure", has_text=title).first.locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + across * box["width"] - 3, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + across * box["width"], box["y"] + box["height"] / 2)
    page.wait_for_selector(".hoverlayer .hovertext, .hoverlayer .legend")
    return " ".join(page.locator(".hoverlayer text").all_text_contents())


def test_under_the_mouse_a_curve_tells_its_values_and_a_mark_what_happened(opened):
    page, _, _ = opened()
    assert "smoothed" in hovered(page, "Training loss", 0.8)
    assert "Step 40 was skipped" in hovered(page, "Training loss", (640 - 32) / (1600 - 32))


@pytest.mark.parametrize("options", [{}, DARK])
def test_a_narrow_screen_is_not_overflowed(opened, options):
    page, _, _ = opened(NARROW, **options)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    wide = page.eval_on_selector_all(
        "figure, section, .plot svg.main-svg", "all => all.map(one => one.getBoundingClientRect().right)"
    )
    assert max(wide) <= 400


def test_what_is_folded_opens(opened):
    page, _, _ = opened()
    recipe = page.locator("details").first
    assert not recipe.locator("pre").is_visible()
    recipe.locator("summary").click()
    assert "sequence_length: 8" in recipe.locator("pre").inner_text()


def test_the_screen_is_not_blank_and_follows_the_theme(opened):
    (light, *_), (dark, *_) = opened(), opened(WIDE, **DARK)
    assert colors(light) > 50 and colors(dark) > 50
    grounds = [page.evaluate("getComputedStyle(document.body).backgroundColor") for page in (light, dark)]
    words = [page.locator(".plot text").first.evaluate("one => getComputedStyle(one).fill") for page in (light, dark)]
    assert grounds == ["rgb(245, 246, 248)", "rgb(18, 21, 26)"] and words == ["rgb(28, 35, 48)", "rgb(230, 233, 238)"]


def test_a_theme_that_changes_while_the_page_is_open_is_followed(opened):
    page, _, complaints = opened()
    page.emulate_media(color_scheme="dark")
    expect(page.locator(".plot text").first).to_have_css("fill", "rgb(230, 233, 238)")
    assert complaints == []
