"""Show results of the public functions as text and in notebooks, and progress only where the caller asks for it."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import Progress

_WIDTH = 100
_CELL = "text-align: left; vertical-align: top"
_PRE = '<pre style="font-family: monospace; line-height: normal; white-space: pre">{code}</pre>'


def quiet_progress() -> Progress:
    """Return a progress bar that shows nothing and whose console prints nothing."""
    return Progress(console=Console(quiet=True), disable=True)


def rich_to_text(renderable: RenderableType) -> str:
    """Return a rich renderable as plain text, at most 100 columns wide and without colours."""
    # Without force_jupyter=False rich displays the table in a notebook instead of writing it to the file.
    console = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, force_terminal=False, record=True)
    console.print(renderable)
    return console.export_text().rstrip()


def rich_to_html(renderable: RenderableType) -> str:
    """Return a rich renderable as preformatted HTML with its colours, for ``_repr_html_``."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, record=True)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=_PRE)


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table for ``_repr_html_``; every text is escaped."""

    def row(cells: Sequence[object], tag: str) -> str:
        inner = "".join(f'<{tag} style="{_CELL}">{html.escape(str(cell))}</{tag}>' for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><caption>{html.escape(title)}</caption>{row(columns, 'th')}{body}</table>"
