"""Undocumented parts of other libraries are where we look for them, and are used in one module for each library."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re

import pytest
from transformers import LlamaModel

from mtp_train.upstream import deepspeed_private, transformers_private
from repository import REPOSITORY

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


def is_there(symbol: str) -> bool:
    """Return whether the installed version has a symbol, or mentions it in its owner's source: instances may set it."""
    owner_name, _, name = symbol.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_name)
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, name) or re.search(rf"\.{name}\b", inspect.getsource(owner)) is not None


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_an_undocumented_symbol_is_where_it_is_looked_for(symbol: str) -> None:
    pytest.importorskip(re.split(r"[.:]", symbol)[0])
    assert is_there(symbol)


@pytest.mark.parametrize(
    "symbol", ["transformers:PretrainedConfig._attn", "transformers:NoSuchClass.any", "transformers.no_such_module.any"]
)
def test_a_symbol_that_moved_is_missed(symbol: str) -> None:
    assert not is_there(symbol)


def test_a_cache_is_passed_under_the_name_that_models_give_it() -> None:
    assert transformers_private.CACHE in inspect.signature(LlamaModel.forward).parameters


def undocumented(source: str) -> list[str]:
    """Return the undocumented modules that some code imports, and the underscored names of the tables that it uses."""
    private = {name for symbol in SYMBOLS if (name := symbol.rpartition(".")[2]).startswith("_")}
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
