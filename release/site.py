"""Hooks of the site's build (mkdocs.yml).

- Links to the source, and the version, come from the project's metadata. A link that it lacks is left out.
- Every figure gets a copy in dark colors.
- The name of an option is not broken after its first hyphens.
- The search does not find internals and reports.
"""

from __future__ import annotations

import colorsys
import posixpath
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INTERNAL = ("adr/", "internals/", "reports/", "notebook.md")
LINKS = "<!-- project links -->"  # replaced on the landing page
_COLOR = re.compile(r"#([0-9a-fA-F]{6})\b")
_FIGURE = re.compile(r"!\[([^\]]*)\]\(([^()\s#]+)\.svg\)(\{[^}]*\})?")
# Of inline code: a short word with a hyphen, or the beginning of an option with a long name.
_CODE = re.compile(r"<code>([^<\n]*)</code>")
_WORD = re.compile(r"(?<!\S)(?:(?=\S*-)\S{1,28}(?!\S)|--?\w+)")
_WHOLE = r'<span class="whole">\g<0></span>'
# Lightness of white and of black in dark copies.
_DARKEST, _LIGHTEST = 0.13, 0.9
# Colors up to this lightness count as black: text is then readable on dark boxes.
_INK = 0.2
# The background of Material's dark pages.
_PAPER = "#1e2129"


def project_urls(pyproject: str) -> dict[str, str]:
    """[project.urls] with lower-case names; empty if it has none."""
    urls = tomllib.loads(pyproject)["project"].get("urls", {})
    return {name.lower(): url for name, url in urls.items()}


def source_url(urls: dict[str, str]) -> str | None:
    return next((urls[name] for name in ("source", "repository", "source code") if name in urls), None)


def version() -> str | None:
    """The last release's tag; None without one."""
    git = ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def links(urls: dict[str, str], tag: str | None) -> str:
    """One line of Markdown: version, source, changelog."""
    source = source_url(urls)
    parts = [f"Version {tag.removeprefix('v')}" if tag else "", f"[Source]({source})" if source else ""]
    return " · ".join([*filter(None, parts), "[Changelog](changelog.md)"])


def dark(svg: str) -> str:
    """The figure for a dark page: lightness is reversed, hue and saturation stay."""

    def reverse(match: re.Match[str]) -> str:
        if match[1].lower() == "ffffff":
            return _PAPER
        red, green, blue = (int(match[1][i : i + 2], 16) / 255 for i in (0, 2, 4))
        hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
        lightness = 0 if lightness < _INK else lightness
        lightness = _DARKEST + (1 - lightness) * (_LIGHTEST - _DARKEST)
        return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))

    svg = _COLOR.sub(reverse, svg)
    return re.sub(r"<svg ", '<svg fill="#e6e6e6" ', svg, count=1)  # text without a color is black


def in_both_palettes(markdown: str) -> str:
    return _FIGURE.sub(r"![\1](\2.svg#only-light)\3 ![\1](\2.dark.svg#only-dark)\3", markdown)


def keep_words(html: str) -> str:
    """Marks the words of inline code that a line must not break (docs/stylesheets)."""
    return _CODE.sub(lambda code: "<code>" + _WORD.sub(_WHOLE, code[1]) + "</code>", html)


def changelog(text: str) -> str:
    """CHANGELOG.md as a page of the site, whose links begin in docs/."""
    return re.sub(r"\]\(docs/", "](", text)


# What mkdocs calls.


def on_config(config: Any) -> Any:
    if url := source_url(project_urls((ROOT / "pyproject.toml").read_text())):
        config["repo_url"], config["repo_name"] = url, posixpath.basename(url.rstrip("/"))
    return config


def on_files(files: Any, config: Any) -> Any:
    # only the site's environment has it
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    for file in [*files]:
        if file.src_uri.endswith(".svg"):
            text = dark(Path(file.abs_src_path).read_text())
            files.append(
                File.generated(config, file.src_uri.removesuffix(".svg") + ".dark.svg", content=text)
            )
    page = changelog((ROOT / "CHANGELOG.md").read_text())
    files.append(File.generated(config, "changelog.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith(INTERNAL):
        page.meta["search"] = {"exclude": True}
    if LINKS in markdown:
        urls = project_urls((ROOT / "pyproject.toml").read_text())
        markdown = markdown.replace(LINKS, links(urls, version()))
    return in_both_palettes(markdown)


def on_page_content(html: str, **_: Any) -> str:
    return keep_words(html)
