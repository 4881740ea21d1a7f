"""Reads an HTML page as strictly as a report must be written: every element closed, every id once, nothing fetched."""

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta"}
FORBIDDEN = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "foreignobject", "image", "animate"}
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "formaction", "poster", "data", "background", "ping"}


@dataclass
class Element:
    """An element, what is written in it, and what it holds."""

    tag: str
    attributes: dict[str, str]
    parent: "Element | None" = None
    children: list["Element"] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def all(self, tag: str) -> list["Element"]:
        """All elements of a kind in it, in order."""
        found = [self] if self.tag == tag else []
        return found + [inner for child in self.children for inner in child.all(tag)]

    @property
    def text(self) -> str:
        """All that is written in it."""
        return "".join(self.pieces)

    @property
    def value(self) -> float:
        """The exact number in it."""
        (data,) = self.all("data")
        return float(data.attributes["value"])


class Page(HTMLParser):
    """A page that has been read; what is wrong with it was said at once."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.ids: dict[str, Element] = {}
        self._now, self._referred = self.root, list[str]()
        assert text.startswith("<!DOCTYPE html>")
        self.feed(text)
        self.close()
        assert self._now is self.root, f"<{self._now.tag}> is not closed"
        missing = set(self._referred) - self.ids.keys()
        assert not missing, f"parts of pictures, or places on the page, are missing: {missing}"
        counts = Counter(element.tag for element in _flat(self.root))
        assert all(counts[tag] == 1 for tag in ("html", "head", "title", "body", "main", "h1", "style"))
        (style,) = self.root.all("style")
        assert "url(" not in style.text
        assert "@import" not in style.text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in FORBIDDEN, f"<{tag}>"
        attributes = {name: value or "" for name, value in attrs}
        assert len(attributes) == len(attrs), f"an attribute twice: {attrs}"
        for name, value in attributes.items():
            self._check(name, value)
        element = Element(tag, attributes, self._now)
        self._now.children.append(element)
        if "id" in attributes:
            assert attributes["id"] not in self.ids, f"id {attributes['id']} twice"
            self.ids[attributes["id"]] = element
        if tag not in VOID:
            self._now = element

    def handle_endtag(self, tag: str) -> None:
        assert self._now.tag == tag, f"</{tag}> closes <{self._now.tag}>"
        assert self._now.parent is not None
        self._now = self._now.parent

    def handle_data(self, data: str) -> None:
        element: Element | None = self._now
        while element is not None:
            element.pieces.append(data)
            element = element.parent

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def _check(self, name: str, value: str) -> None:
        assert not name.startswith("on"), f"{name} would run a script"
        if name in ADDRESSES:
            assert value.startswith("#"), f"{name}={value} leaves the page"
            self._referred.append(value[1:])
        for part in value.split("url(")[1:]:
            assert part.startswith("#"), f"{name}={value} leaves the page"
            self._referred.append(part[1 : part.index(")")])

    # --- what it says ------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """All that is shown."""
        return " ".join(self.root.all("body")[0].text.split())

    def fact(self, key: str) -> float:
        """An exact number of the results."""
        return self.ids[f"fact-{key}"].value

    def rows(self, table: str) -> list[list[Element]]:
        """The cells of a table's body."""
        (body,) = self.ids[table].all("tbody")
        return [row.all("td") for row in body.all("tr")]


def _flat(element: Element) -> list[Element]:
    return [element, *(inner for child in element.children for inner in _flat(child))]
