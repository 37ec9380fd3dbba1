# SPDX-License-Identifier: Apache-2.0
"""Test the report in a browser, wide and narrow: it sends zero requests, fits, is readable, and its script works."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_runs import GOOD, RIVALS, made, result, timing
from tests.unit.bench.test_contact_sheet import flat
from tests.unit.bench.test_report import EVIL, evil_run
from tests.unit.bench.test_report_samples import entry, folder
from tokenprune_bench.report.page import make_page
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.samples import FOLDER, read_samples

WIDE, NARROW = 1280, 400


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page with two comparable runs, another run, long and harmful names, and samples with a missing image."""
    path = tmp_path_factory.mktemp("report")
    methods = [
        result(f"method-{index}", keep, 90 - index, 60 + 3 * index, timing=timing(0.5 + keep * index / 5))
        for index in range(3)
        for keep in (0.25, 0.5)
    ]
    harmful = entry(method=EVIL, prediction=EVIL * 3, note=EVIL, image=None)
    run_folder = folder(path, entry(method="method-1"), entry(method="random", score=0.0), harmful)
    first = made("A", *RIVALS, *methods, environment=dict(model="an-organisation/a-model-with-a-long-name-" * 3))
    first = Run("runs_" * 20, first.results, read_samples(run_folder), "A")
    file = path / "page.html"
    file.write_text(make_page([first, made("B", *RIVALS, GOOD | dict(timing=timing(0.7))), evil_run("C")]))
    return file


@pytest.fixture
def opened(browser: Any, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the page at the requested width. Requests, errors and console messages fail the test."""
    width, scheme = getattr(request, "param", (WIDE, "light"))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, messages = [], []
    page.route("**/*", lambda route: (requests.append(route.request.url), route.continue_()))
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda message: messages.append(str(message)))
    page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
    page.goto(page_file.as_uri(), wait_until="networkidle")
    yield page
    page.close()
    assert messages == []
    assert {url for url in requests if not url.startswith("data:")} == {page_file.as_uri()}


@pytest.mark.parametrize("opened", [(WIDE, "light"), (NARROW, "dark")], indirect=True)
def test_the_page_fits_and_is_readable(opened: Any) -> None:
    width = opened.viewport_size["width"]
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    sizes = opened.evaluate("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt.length])")
    assert len(sizes) == 3 and all(complete and natural > 0 and alt for complete, natural, alt in sizes)
    # The size of letters in plots on the screen, and whether they stay inside.
    texts = opened.evaluate(
        """[...document.querySelectorAll("figure.plot > svg text")].map(one => {
          const box = one.getBoundingClientRect();
          const size = parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a;
          return [size, box.left, box.right, one.textContent];
        })"""
    )
    assert len(texts) > 50
    for size, left, right, text in texts:
        assert size >= 9 and left >= 0 and right <= width, (size, left, right, text)
    smallest = opened.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].map(one => parseFloat(getComputedStyle(one).fontSize)))"
    )
    assert smallest >= 12
    # The scores of the first table and the verdict are visible without scrolling.
    score = opened.locator("#run-1 table").first.locator("thead th", has_text="accuracy %").bounding_box()
    verdict = opened.locator("#run-1 .verdict").first.bounding_box()
    assert score["x"] + score["width"] <= width and verdict["x"] + verdict["width"] <= width
    assert verdict["y"] < opened.locator("#run-1 figure").first.bounding_box()["y"]
    # A wide table scrolls inside its box.
    boxes = opened.evaluate(
        "[...document.querySelectorAll('div.scroll')].map(one => [one.scrollWidth, one.clientWidth])"
    )
    assert len(boxes) == 10 and any(inner > outer for inner, outer in boxes) == (width == NARROW)


@pytest.mark.parametrize("opened", [(WIDE, "light"), (WIDE, "dark")], indirect=True)
def test_text_stands_out_in_light_and_dark(opened: Any) -> None:
    """Check the contrast that WCAG 2 requires for text (AA, 4.5), for every text color."""
    colours = opened.evaluate(
        """(() => {
          const seen = new Set();
          for (const one of document.querySelectorAll("body, body *")) {
            const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
            if (!own || one.closest("script, style, title")) continue;
            const style = getComputedStyle(one);
            const text = one instanceof SVGElement ? style.fill : style.color;
            let back = one;
            while (back && getComputedStyle(back).backgroundColor === "rgba(0, 0, 0, 0)") back = back.parentElement;
            seen.add(text + "|" + (back ? getComputedStyle(back).backgroundColor : "none"));
          }
          return [...seen];
        })()"""
    )
    assert len(colours) > 3
    for pair in colours:
        light, dark = sorted(map(luminance, pair.split("|")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair


def luminance(colour: str) -> float:
    """Return the relative luminance of a color such as "rgb(1, 2, 3)"."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_headings_tables_and_images_have_names(opened: Any) -> None:
    levels = opened.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(one => Number(one.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert opened.evaluate("document.querySelectorAll('table td').length > 100")
    assert set(opened.evaluate("[...document.querySelectorAll('th')].map(one => one.scope)")) == {"col", "row"}
    unnamed = opened.evaluate(
        """[...document.querySelectorAll("svg[role=img]")].filter(one =>
          !["aria-labelledby", "aria-describedby"].every(name =>
            document.getElementById(one.getAttribute(name))?.textContent.trim())).length"""
    )
    assert unnamed == 0


def test_a_table_is_sorted_and_put_back(opened: Any) -> None:
    table = opened.locator("#run-1 table").first

    def column(index: int) -> list[str]:
        return [text.strip() for text in table.locator(f"tbody tr > :nth-child({index + 1})").all_inner_texts()]

    methods, score = column(0), table.locator("thead button", has_text="accuracy %")
    scores = column(2)
    score.click()
    assert column(2) == sorted(scores, key=float, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    score.click()
    assert column(2) == sorted(scores, key=float)
    score.click()
    assert column(0) == methods and table.locator("th[aria-sort]").count() == 0
    table.locator("thead button", has_text="visual tokens").click()
    assert [text.split("→")[1].strip() for text in column(4)] == [*["100"], *["50"] * 3, *["25"] * 5]
    times = table.locator("thead button", has_text="TTFT")
    for _ in range(2):
        times.click()
        assert column(8)[-2:] == ["", ""] and "" not in column(8)[:-2]  # rows without times come last in both orders


def test_a_selected_method_is_highlighted_in_all_plots(opened: Any) -> None:
    button = opened.locator("#run-1 .legend button", has_text="method-1")
    button.click()
    opened.mouse.move(0, 0)

    def clear(selector: str) -> set[str]:
        tags_of_series = opened.evaluate(
            f"[...document.querySelectorAll('{selector}')].filter(one => getComputedStyle(one).opacity === '1')"
            ".map(one => one.dataset.tags)"
        )
        return {tag for tags in tags_of_series for tag in tags.split()}

    assert button.get_attribute("aria-pressed") == "true"
    assert clear("#run-1 .plots:not(.small) g.series") == {"m1"}
    assert clear("#joint-1 g.series") == {"m1", "r0"}
    button.click()
    opened.mouse.move(0, 0)
    assert button.get_attribute("aria-pressed") == "false" and {"m0", "m1", "m2"} < clear("#run-1 g.series")


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("methods", [2, 4, 7, 8])
def test_rows_of_samples_are_even(browser: Any, tmp_path: Path, width: int, methods: int) -> None:
    """With drawings of any shape and missing drawings, captions of a row begin at one height, and all rows but the last
    have the same number of tiles."""
    entries = [entry(method=f"m{index}", image=f"0-{index % 2}.webp") for index in range(methods - 1)]
    run_folder = folder(tmp_path, *entries, entry(method="blank", image=None, note="a reason of many words " * 3))
    flat(1, 64).resize((64, 90)).save(run_folder / FOLDER / "0-0.webp")
    run = made("", *RIVALS)
    file = tmp_path / "page.html"
    file.write_text(make_page([Run("run", run.results, read_samples(run_folder))]))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(file.as_uri())
    tops = page.evaluate(
        """[...document.querySelectorAll(".tile")].map(one => [one, one.querySelector("figcaption")].map(part =>
          Math.round(part.getBoundingClientRect().top)))"""
    )
    page.close()
    rows: dict[int, list[int]] = {}
    for top, caption in tops:
        rows.setdefault(top, []).append(caption)
    assert all(len(set(captions)) == 1 for captions in rows.values())
    across = 2 if width == NARROW else {2: 3, 4: 3, 7: 4, 8: 3}[methods]
    num_full, rest = divmod(methods + 1, across)
    assert [len(captions) for captions in rows.values()] == [across] * num_full + [rest] * (rest > 0)


def test_a_verdict_of_none_takes_less_room(browser: Any, tmp_path: Path) -> None:
    def card(lost: int, width: int) -> tuple[float, str, str]:
        file = tmp_path / f"{lost}.html"
        file.write_text(make_page([made("", *RIVALS, result("some", 0.25, 100 - lost, 100 - lost))]))
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(file.as_uri())
        measures = page.evaluate(
            """(() => {
              const card = document.querySelector(".verdict");
              const style = (part) => getComputedStyle(card.querySelector(part));
              return [card.getBoundingClientRect().height, style(".taken").fontSize, style("dl").display];
            })()"""
        )
        page.close()
        return tuple(measures)

    for width in (WIDE, NARROW):
        (none, letters, facts), (best, _, _) = card(20, width), card(0, width)
        assert none < 0.6 * best and (letters, facts) == ("16px", "block")


def test_without_the_script_the_page_is_complete(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": NARROW, "height": 900})
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("table").count() == 10 and page.locator("figure.plot").count() > 6
    assert page.locator(".legend li").first.is_visible() and page.locator("button").count() == 0
    context.close()
