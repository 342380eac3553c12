"""Where the files of the repository are, and what its pages say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RECIPES = REPOSITORY / "recipes"
SCRIPTS = REPOSITORY / "scripts"


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of a page's code blocks as words, continued lines joined, comments dropped."""
    for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield words
