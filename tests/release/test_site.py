"""Hooks of the site: links from the metadata, dark figures, internals outside of the search."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from release import site

URLS = '[project]\nname = "a"\n[project.urls]\nSource = "https://example.org/a"\n'


def test_links_come_from_the_metadata() -> None:
    assert site.project_urls(URLS) == {"source": "https://example.org/a"}
    assert site.links(site.project_urls(URLS), "v1.2.3") == (
        "Version 1.2.3 · [Source](https://example.org/a) · [Changelog](changelog.md)"
    )


def test_missing_metadata_gives_no_link() -> None:
    assert site.links(site.project_urls('[project]\nname = "a"\n'), None) == "[Changelog](changelog.md)"


@pytest.mark.parametrize("name", ["Source", "Repository", "source code"])
def test_the_source_has_several_names(name: str) -> None:
    assert site.source_url({name.lower(): "https://example.org/a"}) == "https://example.org/a"


def brightness(color: str) -> float:
    return sum(int(color[i : i + 2], 16) for i in (1, 3, 5)) / 765


@pytest.mark.parametrize("path", sorted((site.ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_a_dark_figure_keeps_its_shapes(path) -> None:
    light = path.read_text()
    dark = site.dark(light)
    color = r"#[0-9a-f]{6}\b"
    assert len(re.findall(color, dark)) == len(re.findall(color, light, re.IGNORECASE)) + 1
    strip = re.compile(color, re.IGNORECASE)
    assert strip.sub("", dark).replace(' fill=""', "") == strip.sub("", light).replace(' fill=""', "")


def test_ink_and_paper_change_places() -> None:
    dark = site.dark('<svg ><rect fill="#ffffff"/><text fill="#222222"/><rect fill="#d62728"/></svg>')
    default, paper, ink, red = re.findall(r"#[0-9a-f]{6}", dark)
    assert paper == site._PAPER
    assert min(brightness(ink), brightness(default)) > 0.7
    assert int(red[1:3], 16) > 2 * int(red[3:5], 16), "a hue stays"


def test_a_figure_is_shown_in_both_palettes() -> None:
    assert site.in_both_palettes("![a](figures/b.svg)\n\n*c*") == (
        "![a](figures/b.svg#only-light) ![a](figures/b.dark.svg#only-dark)\n\n*c*"
    )
    assert site.in_both_palettes("![a](b.svg){ .wide }") == (
        "![a](b.svg#only-light){ .wide } ![a](b.dark.svg#only-dark){ .wide }"
    )


def test_a_line_does_not_break_an_option_after_its_hyphens() -> None:
    def whole(words: str) -> str:
        return f'<span class="whole">{words}</span>'

    size = "--decode-context-parallel-size"
    assert site.keep_words("<code>a_b --tp-size 2</code>") == f"<code>a_b {whole('--tp-size')} 2</code>"
    assert site.keep_words(f"<code>{size}</code>") == f"<code>{whole('--decode')}{size[8:]}</code>"
    block = "<pre><code>pip --version\n</code></pre>"
    assert site.keep_words(block) == block


def page(uri: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})


@pytest.mark.parametrize("uri", ["adr/README.md", "internals/layout.md", "reports/serving.md", "notebook.md"])
def test_internals_are_no_results_of_the_search(uri: str) -> None:
    excluded = page(uri)
    site.on_page_markdown("text", page=excluded)
    assert excluded.meta == {"search": {"exclude": True}}


@pytest.mark.parametrize("uri", ["index.md", "engines.md", "performance.md"])
def test_users_pages_are(uri: str) -> None:
    found = page(uri)
    site.on_page_markdown("text", page=found)
    assert not found.meta


def test_the_changelog_is_a_page() -> None:
    assert site.changelog("[a](docs/engines.md#b)") == "[a](engines.md#b)"
