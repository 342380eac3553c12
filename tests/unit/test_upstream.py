"""Undocumented parts of other libraries are where we look for them, and are used in one module for each library."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from mtp_train.upstream import Symbol, deepspeed_private, transformers_private

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (REPOSITORY / "mtp_train", REPOSITORY / "inference" / "mtp_inference")
TABLES = {
    "transformers": transformers_private.SYMBOLS,
    "deepspeed": deepspeed_private.SYMBOLS,
}
SYMBOLS = [symbol for table in TABLES.values() for symbol in table]
# The modules that each library documents for imports. peft needs no others.
DOCUMENTED = {
    *("transformers", "transformers.utils", "peft", "deepspeed", "deepspeed.utils"),
    *("accelerate", "accelerate.optimizer", "accelerate.state", "accelerate.utils"),
}


def why_missing(symbol: Symbol) -> str | None:
    """Return what the installed version lacks of a symbol, None where the symbol is there.

    An attribute that only instances have counts as there when the source of its owner mentions it.
    """
    module, _, class_name = symbol.owner.partition(":")
    try:
        owner = importlib.import_module(module)
        owner = getattr(owner, class_name) if class_name else owner
    except (ImportError, AttributeError) as error:
        return f"{symbol.owner.replace(':', '.')} ({error})"
    if hasattr(owner, symbol.name) or re.search(rf"\.{symbol.name}\b", inspect.getsource(owner)):
        return None
    return symbol.path


@pytest.mark.parametrize("symbol", SYMBOLS, ids=[symbol.path for symbol in SYMBOLS])
def test_an_undocumented_symbol_is_where_it_is_looked_for(symbol: Symbol) -> None:
    library = symbol.owner.split(".")[0].split(":")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    missing = why_missing(symbol)
    version = importlib.import_module(library).__version__
    assert missing is None, f"{library} {version} has no {missing}, used in {symbol.used_in}: {symbol.why}"


@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        ("transformers:PretrainedConfig", "_attn", "transformers.PretrainedConfig._attn"),
        ("transformers:NoSuchClass", "any", "transformers.NoSuchClass"),
        ("transformers.no_such_module", "any", "transformers.no_such_module"),
    ],
)
def test_a_symbol_that_moved_is_named(owner: str, name: str, missing: str) -> None:
    found = why_missing(Symbol(owner, name, "nowhere", "a test"))
    assert found is not None
    assert found.startswith(missing)


def undocumented(source: str) -> list[str]:
    """Return the undocumented modules that some code imports, and the underscored names of the tables that it uses."""
    private = {symbol.name for symbol in SYMBOLS if symbol.name.startswith("_")}
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [
                f"{node.module}.{alias.name}" if node.module in TABLES else str(node.module) for alias in node.names
            ]
            # A submodule that is imported by name from the package counts as a module; classes and functions do not.
            modules = [name if name.rpartition(".")[2].islower() else name.rpartition(".")[0] for name in modules]
        elif isinstance(node, ast.Attribute) and node.attr in private:
            found.append(node.attr)
        found += [name for name in modules if name.split(".")[0] in {*TABLES, "peft"} and not is_documented(name)]
    return found


def is_documented(name: str) -> bool:
    """Return whether a name is a documented module, or a function that a documented module exports."""
    module, _, last = name.rpartition(".")
    return name in DOCUMENTED or (module in DOCUMENTED and importlib.util.find_spec(f"{module}.{last}") is None)


def test_undocumented_parts_are_used_through_one_module_for_each_library() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): names
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "upstream" and (names := undocumented(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from transformers.masking_utils import sdpa_mask", ["transformers.masking_utils"]),
        ("from transformers import conversion_mapping", ["transformers.conversion_mapping"]),
        ("from peft.tuners.lora import LoraModel", ["peft.tuners.lora"]),
        ("def f(config):\n    return config._attn_implementation", ["_attn_implementation"]),
        ("from transformers import DynamicCache", []),
        ("from transformers.utils import logging", []),
        ("from accelerate import cpu_offload", []),
    ],
)
def test_an_undocumented_import_is_found(line: str, found: list[str]) -> None:
    assert undocumented(line) == found
