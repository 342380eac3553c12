"""The stages of making the demo; each leaves its result and a note on how it was made in the work directory.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from demo_maker.model import fresh_model, load_trunk_to_train, make_config, save_base, save_finetune
from demo_maker.sanity import answer_figures
from demo_maker.texts import Exchange, Texts, code_rows, tokenise_exchange
from demo_maker.tokenizer import END_OF_TEXT, TURN_END, train_tokenizer, wrap
from demo_maker.training import (
    IGNORED,
    TrainSettings,
    answer_loss,
    joint_losses,
    settings_of,
    shuffled_rows,
    train,
)
from mtp_train.weights.writing import write_json

SEED = 20
DEPTH_WEIGHTS = [0.5, 0.3, 0.2]
BASE = TrainSettings(lr=4e-3, warmup_steps=60)
BASE_TOKENS, BASE_ROW_TOKENS, BASE_ROWS = 2_200_000, 256, 8
FINETUNE = TrainSettings(lr=2e-3, warmup_steps=30, weight_decay=0.0)
FINETUNE_ROWS = 24
HELD_OUT_ROWS = 240


def make_base(texts: Texts, work: Path) -> None:
    """Train trunk and native head together on code, and write the base."""
    learned = [file.text for file in texts.code] + [f"{one.prompt}\n{one.answer}" for one in texts.chat]
    tokenizer = wrap(train_tokenizer(learned), eos_token=END_OF_TEXT)
    rows_NT = code_rows(texts.code, tokenizer, BASE_ROW_TOKENS)
    unseen_NT = code_rows(texts.unseen_code, tokenizer, BASE_ROW_TOKENS)[::7][: HELD_OUT_ROWS // 5]
    trunk, head = fresh_model(make_config(), seed=SEED)

    def losses(tokens_BT: Tensor) -> dict[str, Tensor]:
        return joint_losses(trunk, head, tokens_BT, DEPTH_WEIGHTS)

    num_steps = BASE_TOKENS // (BASE_ROWS * BASE_ROW_TOKENS)
    batches = shuffled_rows(rows_NT, BASE_ROWS, seed=SEED)
    log = train(nn.ModuleList([trunk, head]), batches, losses, BASE, num_steps=num_steps)
    with torch.no_grad():
        held_out = losses(unseen_NT)
    save_base(trunk, head, tokenizer, work / "base")
    weights = dict(zip(held_out, [1.0, *DEPTH_WEIGHTS], strict=True))
    note = {
        "settings": settings_of(BASE),
        "seed": SEED,
        "depth_weights": DEPTH_WEIGHTS,
        "row_tokens": BASE_ROW_TOKENS,
        "rows_per_step": BASE_ROWS,
        "corpus_tokens": rows_NT.numel(),
        "trained_tokens": num_steps * BASE_ROWS * BASE_ROW_TOKENS,
        "held_out_loss": {name: float(loss) / weights[name] for name, loss in held_out.items()},
        "trunk_parameters": sum(parameter.numel() for parameter in trunk.parameters()),
        "head_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "log": log,
    }
    write_json(work / "base.json", note)


def make_finetune(texts: Texts, work: Path) -> None:
    """Fine-tune the base's trunk, and only it, on the exchanges, and write it as transformers saves it."""
    tokenizer = wrap(AutoTokenizer.from_pretrained(work / "base").backend_tokenizer, eos_token=TURN_END)
    trunk = load_trunk_to_train(work / "base")
    exchanges = [tokenise_exchange(one, tokenizer) for one in texts.chat]
    unseen = [tokenise_exchange(one, tokenizer) for one in texts.prompts[:: len(texts.prompts) // HELD_OUT_ROWS]]
    pad = tokenizer.pad_token_id

    def losses(batch: Sequence[Exchange]) -> dict[str, Tensor]:
        return {"answer": answer_loss(trunk, *padded(batch, pad))}

    before = held_out_loss(trunk, unseen, pad)
    num_steps = len(exchanges) // FINETUNE_ROWS
    log = train(trunk, batches_by_length(exchanges), losses, FINETUNE, num_steps=num_steps)
    note = {
        "settings": settings_of(FINETUNE),
        "seed": SEED,
        "rows_per_step": FINETUNE_ROWS,
        "trained_tokens": sum(len(one.tokens) for one in exchanges),
        "mean_answer_tokens": sum(one.answer_end - one.answer_start for one in exchanges) / len(exchanges),
        "held_out_loss": {"before": before, "after": held_out_loss(trunk, unseen, pad)},
        "log": log,
    }
    save_finetune(trunk, tokenizer, work / "finetune")
    write_json(work / "finetune.json", note)


def batches_by_length(exchanges: Sequence[Exchange]) -> Iterator[list[Exchange]]:
    """Yield batches of similar length (little padding) in random order, epoch after epoch."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(exchanges), generator=generator).tolist()
        pools = [order[start : start + 16 * FINETUNE_ROWS] for start in range(0, len(order), 16 * FINETUNE_ROWS)]
        batches: list[list[Exchange]] = []
        for pool in pools:
            pool.sort(key=lambda index: len(exchanges[index].tokens))
            for start in range(0, len(pool), FINETUNE_ROWS):
                batches.append([exchanges[index] for index in pool[start : start + FINETUNE_ROWS]])
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def padded(batch: Sequence[Exchange], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets (``IGNORED`` outside answers) and mask, right-padded; each (B, T)."""
    longest = max(len(one.tokens) for one in batch)
    tokens_BT = torch.full((len(batch), longest), pad)
    targets_BT = torch.full((len(batch), longest), IGNORED)
    mask_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, one in enumerate(batch):
        tokens_BT[row, : len(one.tokens)] = torch.tensor(one.tokens)
        mask_BT[row, : len(one.tokens)] = 1
        # The token before the answer predicts its first token.
        targets_BT[row, one.answer_start - 1 : one.answer_end - 1] = tokens_BT[row, one.answer_start : one.answer_end]
    return tokens_BT, targets_BT, mask_BT


@torch.no_grad()
def held_out_loss(trunk: PreTrainedModel, exchanges: Sequence[Exchange], pad: int) -> float:
    """Return the mean loss per answer token on exchanges."""
    trunk.eval()
    total, count = 0.0, 0
    for start in range(0, len(exchanges), FINETUNE_ROWS):
        tokens_BT, targets_BT, mask_BT = padded(exchanges[start : start + FINETUNE_ROWS], pad)
        num = int((targets_BT != IGNORED).sum())
        total += float(answer_loss(trunk, tokens_BT, targets_BT, mask_BT)) * num
        count += num
    return total / count


def read_samples(work: Path, texts: Texts, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Let the fine-tune answer unseen prompts greedily, one by one, and say how sane the answers are."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(work / "finetune")
    trunk = load_trunk_to_train(work / "finetune").eval()
    chosen = texts.prompts[:: math.ceil(len(texts.prompts) / num_prompts)]
    return answer_figures(trunk, tokenizer, chosen, max_new_tokens)
