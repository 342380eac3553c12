"""Collect text for the demo from the source of Python's standard library: no network, one licence (PSF).

The top-level modules are split in three sets. The base is trained on the source of ``code``. The fine-tune is trained
to describe functions of ``chat``. Neither is trained on ``prompts``: their functions are the prompts of the package, so
trunk and head have not seen the prompts that a recipe holds out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = "test tests idle_test site-packages idlelib lib2to3 turtledemo ensurepip pydoc_data encodings __phello__"
SKIPPED_PARTS = frozenset(_SKIPPED.split())
# Modules of different styles.
_CODE = """
_pydecimal _pyio argparse ast asyncio cgi codecs collections concurrent configparser contextlib ctypes dataclasses
datetime difflib dis distutils doctest email enum ftplib http imaplib importlib inspect json logging mailbox
multiprocessing nntplib optparse os pathlib pickle pickletools pydoc random re smtplib ssl statistics subprocess
tarfile threading tkinter traceback turtle typing unittest urllib xml xmlrpc zipfile
"""
CODE_MODULES = tuple(_CODE.split())
# Modules that contain the same functions stay in one set.
TWINS = (
    ("posixpath", "ntpath", "genericpath", "nturl2path"),
    ("aifc", "sunau", "wave", "chunk"),
    ("asyncore", "asynchat", "smtpd"),
    ("bz2", "gzip", "lzma", "_compression"),
    ("profile", "cProfile", "pstats"),
    ("pty", "tty"),
    ("abc", "_py_abc"),
)
# These modules repeat modules of CODE_MODULES, so they are not used as prompts.
_TWINS_OF_CODE = "_collections_abc _threading_local _weakrefset cgitb fractions imp pkgutil socket weakref zipimport"
TWINS_OF_CODE = frozenset(_TWINS_OF_CODE.split())


@dataclass(frozen=True)
class SourceFile:
    """A file of the standard library."""

    module: str
    """Dotted name, ``email.message``."""
    text: str

    @property
    def top(self) -> str:
        """Top-level module."""
        return self.module.split(".")[0]


def source_files() -> list[SourceFile]:
    """Return the files of the standard library without tests and data tables, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_PARTS.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        names = parts[:-1] if parts[-1] == "__init__" else parts
        found.append(SourceFile(".".join(names), path.read_text(encoding="utf-8", errors="replace")))
    return found


def by_module(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    """Group files by top-level module."""
    groups: dict[str, list[SourceFile]] = {}
    for file in files:
        groups.setdefault(file.top, []).append(file)
    return groups


def pick_prompt_modules(num_functions: Mapping[str, int], share: float, smallest: int, largest: int) -> list[str]:
    """Choose modules for the prompts by the hash of their names; modules with the same functions stay together.

    Args:
        num_functions: Number of described functions of each module.
        share: Share of the eligible groups of modules to choose.
        smallest: Fewest functions of a module, so that every held-out module gives a useful estimate.
        largest: Most functions of a module, so that none dominates the others.
    """
    groups: dict[str, list[str]] = {}
    for name, count in num_functions.items():
        if name not in CODE_MODULES and name not in TWINS_OF_CODE and smallest <= count <= largest:
            groups.setdefault(held_out_with(name), []).append(name)
    ordered = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted(name for group in ordered[: round(share * len(ordered))] for name in groups[group])


def held_out_with(module: str) -> str:
    """Return the hold-out group of a module: the first of the modules with the same functions."""
    return next((names[0] for names in TWINS if module in names), module)


def twins_of(modules: Sequence[str]) -> set[str]:
    """Return the modules and all modules with the same functions."""
    touched = [names for names in TWINS if set(names) & set(modules)]
    return set(modules).union(*touched)


def digest(texts: Iterator[str] | Sequence[str]) -> str:
    """Return the sha256 of texts, in order."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(text.encode())
        sha.update(b"\0")
    return sha.hexdigest()
