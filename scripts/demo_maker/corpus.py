"""Text for the demo, from the source of the running Python's own standard library: no network, one licence (PSF).

Three sets of top-level modules. ``code``: their source is what the base learns. ``chat``: their functions are what the
fine-tune learns to describe. ``prompts``: neither trunk ever saw them; their functions are the shipped prompts, so
whatever part of them a recipe holds out is unseen by trunk and head alike.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = "test tests idle_test site-packages idlelib lib2to3 turtledemo ensurepip pydoc_data encodings __phello__"
SKIPPED_PARTS = frozenset(_SKIPPED.split())
# Widely different code, so that the base sees more than one style.
_CODE = """
_pydecimal _pyio argparse ast asyncio cgi codecs collections concurrent configparser contextlib ctypes dataclasses
datetime difflib dis distutils doctest email enum ftplib http imaplib importlib inspect json logging mailbox
multiprocessing nntplib optparse os pathlib pickle pickletools pydoc random re smtplib ssl statistics subprocess
tarfile threading tkinter traceback turtle typing unittest urllib xml xmlrpc zipfile
"""
CODE_MODULES = tuple(_CODE.split())
# Modules that repeat each other's functions stay on one side.
TWINS = (
    ("posixpath", "ntpath", "genericpath", "nturl2path"),
    ("aifc", "sunau", "wave", "chunk"),
    ("asyncore", "asynchat", "smtpd"),
    ("bz2", "gzip", "lzma", "_compression"),
    ("profile", "cProfile", "pstats"),
    ("pty", "tty"),
    ("abc", "_py_abc"),
)
# Not prompts: they repeat modules in CODE_MODULES.
_TWINS_OF_CODE = "_collections_abc _threading_local _weakrefset cgitb fractions imp pkgutil socket weakref zipimport"
TWINS_OF_CODE = frozenset(_TWINS_OF_CODE.split())


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library."""

    module: str
    """Dotted name, ``email.message``."""
    text: str

    @property
    def top(self) -> str:
        """Top-level module."""
        return self.module.split(".")[0]


def source_files() -> list[SourceFile]:
    """Read the standard library, tests and data tables left out, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _read(root, root)


def package_files(name: str) -> list[SourceFile]:
    """Read an installed package, its tests left out, in a fixed order."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name}: not installed; expected it, to read its source. Install it.")
    root = Path(spec.origin).parent
    return _read(root, root.parent)


def _read(directory: Path, root: Path) -> list[SourceFile]:
    found = []
    for path in sorted(directory.rglob("*.py")):
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
    """Pick modules for the prompts by the hash of their names, twins together.

    Args:
        num_functions: Described functions of each module.
        share: Share of the eligible twin groups to take.
        smallest: Modules with fewer functions are not taken: each should say something when it is held out.
        largest: Modules with more are not taken: none should outweigh the rest.
    """
    groups: dict[str, list[str]] = {}
    for name, count in num_functions.items():
        if name not in CODE_MODULES and name not in TWINS_OF_CODE and smallest <= count <= largest:
            groups.setdefault(held_out_with(name), []).append(name)
    ordered = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted(name for group in ordered[: round(share * len(ordered))] for name in groups[group])


def held_out_with(module: str) -> str:
    """Return the group that a module is held out in: the first of those that repeat each other."""
    return next((names[0] for names in TWINS if module in names), module)


def twins_of(modules: Sequence[str]) -> set[str]:
    """Return the modules together with everything that repeats them."""
    touched = [names for names in TWINS if set(names) & set(modules)]
    return set(modules).union(*touched)


def digest(texts: Iterator[str] | Sequence[str]) -> str:
    """Return the sha256 of texts, in order."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(text.encode())
        sha.update(b"\0")
    return sha.hexdigest()
