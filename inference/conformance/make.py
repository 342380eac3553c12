#!/usr/bin/env python
"""Make the trunks, heads and expected drafts of this directory anew, in about ten minutes of a CPU.

    python inference/conformance/make.py OUT

Every head is one of ``scripts/make_witness.py``, smaller. Expected drafts are greedy, of fp32, after every token of a
text, each from a text decoded anew. ``decided`` counts the first ones that bf16 gives too, with weights moved at random
by several roundings: an engine in bf16 is held to these.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from run import AS_TRAINED, EXPECTED

from engines.launch import ENGINES, EngineUnderTest
from engines.ours import Subject, decode, load_subject
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.heads import assistant
from mtp_train.trunk.load import load_trunk
from mtp_train.upstream.transformers_private import replacing
from witness_maker.chain import Chain
from witness_maker.making import NOISE, PROMPTS_FILE, add_head, make_witness

DEPTH, NUM_TEXTS, PROMPT_TOKENS, NEW_TOKENS, MOST_PROMPTS = 3, 6, 12, 20, 100
SEED, NUM_ROUNDED = 0, 4
MOVE = 2.0**-6
"""Standard deviation, relative, of the moves: four times the largest error of rounding to bf16."""
WIRINGS = {AS_TRAINED: "transformers", "vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama.cpp"}
"""Names of wirings to engines that draft in them; ``transformers`` drafts as in training."""
_SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_NARROW = {**_SMALL, "hidden_size": 48}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A trunk to make, with the kind of its own head, or that of the head beside it in ``draft``."""

    kind: str = "mtp"
    sizes: Mapping[str, Any]
    steps: int = 300
    num_drafted: int | None = None
    more: Mapping[str, int] = field(default_factory=dict)
    """Kinds of further heads to their training steps."""


MADE = {
    "qwen3_5": Made(
        sizes={**_NARROW, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "mimo": Made(sizes={**_SMALL, "num_hidden_layers": 2, "tie_word_embeddings": True}),
    "llama": Made(
        kind="eagle3",
        sizes={**_SMALL, "num_hidden_layers": 7, "tie_word_embeddings": True},
        num_drafted=500,
        more={"eagle": 300, "medusa": 300, "dflash": 300},
    ),
    "gemma4": Made(
        kind="assistant",
        sizes={
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
    ),
}


def main() -> None:
    """Make every head and print a line for each."""
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or MADE:
        for head in make(name, MADE[name], out / name):
            path = head or out / name
            texts = expected(open_checkpoint(out / name), head)
            content = {"depth": DEPTH, "texts": texts}
            (path / EXPECTED).write_text(json.dumps(content), encoding="utf-8")
            print(f"{path.relative_to(out)}: {len(texts)} texts", flush=True)


def make(name: str, made: Made, trunk: Path) -> Iterator[Path | None]:
    """Make a trunk and yield its heads: None for its own, else the directory of a draft model."""
    sizes = {**made.sizes, "max_position_embeddings": 256}
    figures = make_witness(
        name, trunk, num_steps=made.steps, seed=SEED, kind=made.kind, num_drafted=made.num_drafted, sizes=sizes
    )
    print(name, figures)
    (trunk / PROMPTS_FILE).unlink()
    yield (trunk / "draft").rename(trunk / made.kind) if made.kind != "mtp" else None
    for kind, num_steps in made.more.items():
        print(kind, add_head(trunk, kind, trunk / kind, num_steps=num_steps, seed=SEED))
        yield trunk / kind


def expected(checkpoint: Checkpoint, draft: Path | None) -> list[dict[str, Any]]:
    """Return texts with the drafts after each of their tokens, by wiring."""
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    chain = Chain.of_trunk(trunk, NOISE)
    # Every other text goes on from words in no order, where a small mistake changes drafts.
    both = [replace(chain, noise=noise).draw(MOST_PROMPTS, PROMPT_TOKENS, generator) for noise in (NOISE, 1.0)]
    prompts = torch.stack(both, dim=1).flatten(0, 1).tolist()
    exact = list(subjects_of(checkpoint, draft, torch.float32))
    rounded = [list(subjects_of(checkpoint, draft, torch.bfloat16, moved)) for moved in range(NUM_ROUNDED)]
    texts: list[dict[str, Any]] = []
    for prompt_ids in prompts:
        found = [[drafted(*one, prompt_ids, draft is None) for _, *one in same] for same in (exact, *rounded)]
        token_ids = found[0][0][0]
        if any(tokens != token_ids for same in found for tokens, _ in same):
            continue
        wirings = {}
        for (name, *_), of_wiring in zip(exact, zip(*found, strict=True), strict=True):
            drafts = [after for _, after in of_wiring]
            wirings[name] = {"drafts": drafts[0], "decided": [*map(decided, zip(*drafts, strict=True))]}
        ours = wirings[AS_TRAINED]["drafts"]
        kept = {name: one for name, one in wirings.items() if name == AS_TRAINED or one["drafts"] != ours}
        texts.append({"prompt_ids": prompt_ids, "token_ids": token_ids, "wirings": kept})
        if len(texts) == NUM_TEXTS:
            return texts
    raise SystemExit(
        f"{draft or checkpoint.path}: {len(texts)} of {MOST_PROMPTS} texts are alike in bf16; train longer"
    )


def decided(drafts: Sequence[Sequence[int]]) -> int:
    """Return how many first drafts several roundings have in common."""
    return sum(1 for _ in itertools.takewhile(lambda same: len({*same}) == 1, zip(*drafts, strict=True)))


def subjects_of(
    checkpoint: Checkpoint, draft: Path | None, dtype: torch.dtype, moved: int | None = None
) -> Iterator[tuple[str, Subject, EngineUnderTest]]:
    """Yield the wirings of a head; with a seed ``moved``, its weights and the trunk's are moved at random."""
    for name, engine_name in WIRINGS.items():
        engine = ENGINES[engine_name]
        if draft is None and name != AS_TRAINED and engine.convention not in checkpoint.family.wiring.conventions:
            continue
        subject = load_subject(checkpoint, engine.convention, dtype, draft=draft)
        subject.trunk.show_to(subject.head)
        if moved is not None:
            generator = torch.Generator().manual_seed(moved)
            for weight in (*subject.trunk.parameters(), *subject.head.parameters()):
                weight.data.mul_(1 + MOVE * torch.randn(weight.shape, generator=generator))
        yield name, subject, engine


def drafted(
    subject: Subject, engine: EngineUnderTest, prompt_ids: Sequence[int], is_own: bool
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a text and the drafts after each of them."""
    offset, more = engine.assistant
    leading_row = engine.leading_row and is_own

    def decoded(prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
        return decode(subject, prompts, depth=DEPTH, max_new_tokens=num_tokens, eos_ids=(), leading_row=leading_row)

    with replacing(assistant, POSITION_OFFSET=offset, MORE_SLIDING_KEYS=more):
        (text,) = decoded([prompt_ids], NEW_TOKENS)
        token_ids = list(text.token_ids)
        # A round of a text that continues this one: its prefill gives the text's next token.
        starts = decoded([[*prompt_ids, *token_ids[:count]] for count in range(NEW_TOKENS)], DEPTH + 2)
    return token_ids, [list(one.rounds[1].drafts) for one in starts]


if __name__ == "__main__":
    main()
