"""Owns the HTML of reports: one file that needs nothing else, and no way for a name to become markup.

Rules kept here:
- `Html` is text that was made here. Everything else passes through `text`; the type checker sees to it.
- No script and nothing fetched; the page's own policy forbids both, should a mistake ever let one in.
- Every number for people is in a `data` element whose value is the exact one.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from html import escape
from importlib import resources
from importlib.metadata import version
from typing import NewType

from offbeat.report.words import UNKNOWN, clean, moment, whole

Html = NewType("Html", str)
VOID = ("meta",)
"""Elements without an end."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
NOTHING = Html("")
DASHES = {"-": "", "--": "5 2.5", ":": "1.2 2.2", "-.": "5 2 1.2 2"}
"""Of a line's style, as SVG says it."""


def text(value: object, shown_max: int = 400) -> Html:
    """Anything as text; never markup."""
    return Html(escape(clean(value, shown_max), quote=True))


def tag(name: str, /, *inside: Html, **attributes: object) -> Html:
    """An element; `class_` is its class, and an attribute that is None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>" + ("" if name in VOID else f"{''.join(inside)}</{name}>"))


def joined(parts: Iterable[Html], between: str = "") -> Html:
    """Pieces one after the other."""
    return Html(escape(between).join(parts))


def value(exact: float | None, shown: str | None = None) -> Html:
    """A number for people, with its exact value in it."""
    if exact is None:
        return text(UNKNOWN)
    return tag("data", text(whole(exact) if shown is None else shown), value=repr(exact))


def stranger(name: object) -> Html:
    """A name that somebody else chose: it keeps its own direction and stays short."""
    return tag("bdi", text(name, 60))


# --- pieces ----------------------------------------------------------------------------------------------------------


def section(key: str, heading: str, *inside: Html) -> Html:
    """A part of the page, which the contents can lead to."""
    return tag("section", tag("h2", text(heading)), *inside, id=key)


def paragraph(*inside: Html, kind: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", *inside, class_=kind)


def facts_table(rows: Sequence[tuple[str, str, Html]]) -> Html:
    """Names and values; each row can be found by its id, `fact-` and the key that comes first."""
    lines = [
        tag("tr", tag("th", text(name), scope="row"), tag("td", inside), id=f"fact-{key}") for key, name, inside in rows
    ]
    return _scrolled(tag("table", tag("tbody", *lines)))


def table(key: str, headings: Sequence[str], rows: Iterable[Sequence[Html]], words: int = 1) -> Html:
    """A table whose first columns hold words, and the rest numbers, to the right."""
    kinds = [None if column < words else "number" for column in range(len(headings))]
    head = [tag("th", text(heading), scope="col", class_=kind) for heading, kind in zip(headings, kinds, strict=True)]
    lines = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)), Html("\n"))
        for row in rows
    ]
    return _scrolled(tag("table", tag("thead", tag("tr", *head)), tag("tbody", *lines), id=key))


def _scrolled(inside: Html) -> Html:
    return tag("div", inside, class_="scroll")


def picture(svg: Html, caption: Html = NOTHING) -> Html:
    """A picture and what it shows."""
    return tag("figure", svg, tag("figcaption", caption) if caption else NOTHING)


def pictures(*figures: Html) -> Html:
    """Pictures side by side, where there is room."""
    return tag("div", *figures, class_="pictures")


def bar(part: float, kind: str = "") -> Html:
    """A bar, drawn and not coloured in, so that it is printed, too."""
    rect = tag("rect", width=f"{max(0.0, min(100.0, 100 * part)):.2f}", height="1")
    return tag(
        "svg", rect, class_=f"bar {kind}".strip(), viewBox="0 0 100 1", preserveAspectRatio="none", aria_hidden="true"
    )


def swatch(colour: int, dash: str) -> Html:
    """How a line looks in the pictures."""
    look = f"stroke: var(--c{colour}); stroke-width: 2.5; fill: none"
    line = tag("path", d="M 0 5 H 28", style=look, stroke_dasharray=DASHES[dash] or None)
    return tag("svg", line, class_="swatch", viewBox="0 0 28 10", aria_hidden="true")


# --- the page --------------------------------------------------------------------------------------------------------


def document(title: str, head: Html, sections: Mapping[str, tuple[str, Html]], at: datetime) -> str:
    """The whole file: sections by key, each with its name in the contents."""
    links = [tag("a", text(name), href=f"#{key}") for key, (name, _) in sections.items()]
    metas = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="referrer", content="no-referrer"),
    )
    header = tag("header", head, tag("nav", joined(links, " "), aria_label="Contents"))
    made = paragraph(text(f"Written by Offbeat {version('offbeat')} on {moment(at)}."))
    body = tag("body", header, tag("main", *(inside for _, inside in sections.values())), tag("footer", made))
    top = tag("head", *metas, tag("title", text(title)), tag("style", _style()))
    return "<!DOCTYPE html>\n" + tag("html", Html("\n"), top, Html("\n"), body, lang="en") + "\n"


@cache
def _style() -> Html:
    return Html((resources.files("offbeat.report") / "style.css").read_text(encoding="utf-8"))
