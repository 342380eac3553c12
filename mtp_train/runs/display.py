"""Show results of the public functions as text and in notebooks, and progress only where the caller asks for it."""

from __future__ import annotations

import contextlib
import html
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.live_render import LiveRender
from rich.progress import Progress

from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.families import Family
from mtp_train.progress import is_main_process

LOG_FILE = "run.log"

_WIDTH = 100

Rows = Iterable[tuple[str, object]]
"""Labels and what is printed behind them; a row with None is not shown."""


def quiet_progress() -> Progress:
    """Return a progress bar that shows nothing and whose console prints nothing."""
    return Progress(console=Console(quiet=True), disable=True)


@contextlib.contextmanager
def logged(run_dir: Path, console: Console) -> Iterator[None]:
    """Append what a console prints within the block to the run's log, also where the console is quiet.

    Warnings, of Python and of loggers, are printed on the console. Nothing is written before the run has claimed the
    directory.
    """
    if not is_main_process():
        yield
        return
    log = _Log(run_dir / LOG_FILE)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: console.print(record.getMessage(), markup=False)  # type: ignore[method-assign]
    console.push_render_hook(log)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_: console.print(
                f"{category.__name__}: {message}", markup=False
            )
            yield
    except BaseException as error:
        log.write(f"{type(error).__name__}: {error}\n")
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        console.pop_render_hook()


class _Log(RenderHook):
    """A file that gets what a console prints, without the bars of a terminal."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept = f"\n{datetime.now():%Y-%m-%d %H:%M:%S} {' '.join(sys.argv)}\n"

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Write what is about to be printed, and leave it as it is."""
        shown = [one for one in renderables if not isinstance(one, Control | LiveRender)]
        if shown:
            self.write(as_text(*shown, soft_wrap=True))
        return renderables

    def write(self, text: str) -> None:
        self._kept += text
        if (self._file.parent / RECIPE_FILE).exists():
            with self._file.open("a", encoding="utf-8") as handle:
                handle.write(self._kept)
            self._kept = ""


class Shown:
    """Base of results, which are dataclasses: plain JSON, and a title over labelled rows, in notebooks too."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as the command prints them with ``--json``."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[call-overload]

    def _title(self) -> str:
        return ""

    def _rows(self) -> Rows:
        return ()

    def __str__(self) -> str:
        rows = (f"{label}: {shown}" for label, shown in self._rows() if shown is not None)
        return "\n".join([self._title(), *rows]).removeprefix("\n")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def as_text(*shown: RenderableType, soft_wrap: bool = False) -> str:
    """Return what rich prints where there is no terminal."""
    # Without force_jupyter=False rich displays the table in a notebook instead of returning it.
    console = Console(width=_WIDTH, force_jupyter=False, force_terminal=False)
    with console.capture() as text:
        console.print(*shown, sep="\n", soft_wrap=soft_wrap)
    return text.get()


def serving_lines(serves: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a line per engine that serves, one for all engines that are not verified, and one per reason against."""
    unverified = {text for text in serves.values() if text.startswith("not verified")}
    together: dict[str, list[str]] = {}
    for engine, text in serves.items():
        several = len(unverified) > 1 and text in unverified
        together.setdefault("not verified by this project" if several else text, []).append(engine)
    every = len(together) == 1 < len(serves)
    return [("every engine" if every else ", ".join(engines), text) for text, engines in together.items()]


def wiring_note(family: Family, convention: str, serves: Mapping[str, str]) -> str | None:
    """Return which engines wire a head otherwise than it is trained and measured; None if none that serves it does."""
    engines = [one for one in family.otherwise_wired(convention) if not serves[one].startswith(("no: ", "not "))]
    if not engines:
        return None
    return (
        f"wired in another way on {', '.join(engines)} than it is trained and measured here, so that fewer drafts "
        f"may be accepted there; head.convention={engines[0]} trains and measures for {engines[0]}"
    )
