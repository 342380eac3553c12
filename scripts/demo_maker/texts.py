"""Build the three sets of text: code for the base, chats for the fine-tune, prompts for the package.

Shapes: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo_maker.corpus import (
    CODE_MODULES,
    SourceFile,
    by_module,
    digest,
    pick_prompt_modules,
    source_files,
    twins_of,
)
from demo_maker.records import Described, described_functions
from demo_maker.tokenizer import END_OF_TEXT

PROMPT_SHARE = 0.75
SMALLEST_PROMPT_MODULE, LARGEST_PROMPT_MODULE = 8, 160
MAX_EXCHANGE_CHARS = 480


@dataclass(frozen=True)
class Texts:
    """All texts from the standard library, split by set."""

    code: list[SourceFile]
    chat: list[Described]
    prompts: list[Described]
    unseen_code: list[SourceFile]
    """Source of the modules of the prompts: code that the base was not trained on."""

    def provenance(self) -> dict[str, Any]:
        """Return the sources and sizes of the sets."""
        return {
            "source": "the standard library of the Python that ran the script",
            "licence": "The source is under the PSF licence; the exchanges quote its signatures and docstrings.",
            "code": {
                "modules": sorted({file.top for file in self.code}),
                "sha256": digest([f.text for f in self.code]),
            },
            **{
                name: {
                    "modules": sorted({one.group for one in rows}),
                    "count": len(rows),
                    "sha256": digest([f"{one.prompt}\n{one.answer}" for one in rows]),
                }
                for name, rows in {"chat": self.chat, "prompts": self.prompts}.items()
            },
        }


def gather_texts() -> Texts:
    """Read the standard library and split it by module.

    Prompts whose docstring occurs in the fine-tune's chats are dropped, since a split by module does not prevent equal
    content (overridden methods share docstrings).
    """
    groups = by_module(source_files())
    described = {name: [one for file in files for one in described_functions(file)] for name, files in groups.items()}
    described = {name: [one for one in rows if _short(one)] for name, rows in described.items()}
    sizes = {name: len(rows) for name, rows in described.items()}
    prompt_modules = pick_prompt_modules(sizes, PROMPT_SHARE, SMALLEST_PROMPT_MODULE, LARGEST_PROMPT_MODULE)
    kept_out = twins_of(prompt_modules)
    chat = [one for name, rows in described.items() if name not in kept_out for one in rows]
    seen = {one.doc for one in chat if one.doc is not None}
    return Texts(
        code=[file for name in CODE_MODULES for file in groups[name]],
        chat=chat,
        prompts=[one for name in prompt_modules for one in described[name] if one.doc not in seen],
        unseen_code=[file for name in prompt_modules for file in groups[name]],
    )


def _short(one: Described) -> bool:
    return len(one.prompt) + len(one.answer) <= MAX_EXCHANGE_CHARS


def code_rows(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerFast, row_tokens: int) -> Tensor:
    """Return files, each followed by the end-of-text token, joined and cut into rows: int64, (N, T)."""
    stream = [token for file in files for token in tokenizer(file.text + END_OF_TEXT)["input_ids"]]
    num_rows = len(stream) // row_tokens
    return torch.tensor(stream[: num_rows * row_tokens]).view(num_rows, row_tokens)


@dataclass(frozen=True)
class Exchange:
    """A tokenised question with its answer."""

    tokens: list[int]
    answer_start: int
    answer_end: int
    """One past the end-of-turn token, which is the last training target."""


def tokenise_exchange(one: Described, tokenizer: PreTrainedTokenizerFast) -> Exchange:
    """Apply the chat template, and locate the answer in the tokens."""
    messages = one.messages()
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    full = tokenizer.apply_chat_template(messages, return_dict=False)
    return Exchange(full, len(prompt), full.index(tokenizer.eos_token_id, len(prompt)) + 1)
