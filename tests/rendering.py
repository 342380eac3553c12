"""Helpers to read a rendered page and the output of a terminal."""

from __future__ import annotations

import io
from html.parser import HTMLParser

from rich.console import Console, RenderableType

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=y>{{ 7 * 7 }}"


class Reader(HTMLParser):
    """Collect tags with their attributes, visible text, and tags left open."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def printed(content: RenderableType, width: int = 80) -> str:
    """Return the text in a terminal of that width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
