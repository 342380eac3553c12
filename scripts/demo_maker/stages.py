"""The stages of making the demo. Each writes its result, and a note with its settings, to the work directory.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from demo_maker.model import fresh_model, load_trunk_to_train, make_config, save_base, save_finetune
from demo_maker.sanity import answer_figures
from demo_maker.sizes import Size
from demo_maker.texts import Exchange, Texts, code_rows, tokenise_exchange
from demo_maker.tokenizer import END_OF_TEXT, TURN_END, train_tokenizer, wrap
from demo_maker.training import (
    IGNORED,
    answer_loss,
    joint_losses,
    shuffled_rows,
    train,
)
from mtp_train.checkpoints.writing import write_json

SEED = 20
DEPTH_WEIGHTS = [0.5, 0.3, 0.2]
HELD_OUT_ROWS, HELD_OUT_BATCH = 240, 24


def make_base(texts: Texts, work: Path, size: Size, device: torch.device, eos_token: str = END_OF_TEXT) -> None:
    """Train trunk and native head jointly on code, and write the base."""
    learned = [file.text for file in texts.code] + [f"{one.prompt}\n{one.answer}" for one in texts.chat]
    tokenizer = wrap(train_tokenizer(learned, size.shape["vocab_size"]), eos_token=eos_token)
    rows_NT = code_rows(texts.code, tokenizer, size.base_row_tokens)
    unseen_NT = code_rows(texts.unseen_code, tokenizer, size.base_row_tokens)[::7][: HELD_OUT_ROWS // 5]
    trunk, head = (module.to(device) for module in fresh_model(make_config(size), seed=SEED))

    def losses(tokens_BT: Tensor) -> dict[str, Tensor]:
        return joint_losses(trunk, head, tokens_BT.to(device), DEPTH_WEIGHTS)

    num_steps = size.base_tokens // (size.base_rows * size.base_row_tokens)
    batches = shuffled_rows(rows_NT, size.base_rows, seed=SEED)
    log = train(nn.ModuleList([trunk, head]), batches, losses, size.base, num_steps=num_steps)
    with torch.no_grad():
        held_out = losses(unseen_NT)
    save_base(trunk, head, tokenizer, work / "base")
    weights = dict(zip(held_out, [1.0, *DEPTH_WEIGHTS], strict=True))
    note = {
        "settings": asdict(size.base),
        "seed": SEED,
        "depth_weights": DEPTH_WEIGHTS,
        "row_tokens": size.base_row_tokens,
        "rows_per_step": size.base_rows,
        "corpus_tokens": rows_NT.numel(),
        "trained_tokens": num_steps * size.base_rows * size.base_row_tokens,
        "held_out_loss": {name: float(loss) / weights[name] for name, loss in held_out.items()},
        "trunk_parameters": sum(parameter.numel() for parameter in trunk.parameters()),
        "head_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "log": log,
    }
    write_json(work / "base.json", note)


def make_finetune(texts: Texts, work: Path, size: Size, device: torch.device) -> None:
    """Fine-tune the base's trunk without its head on the chats, and write it by ``save_pretrained``."""
    tokenizer = wrap(AutoTokenizer.from_pretrained(work / "base").backend_tokenizer, eos_token=TURN_END)
    trunk = load_trunk_to_train(work / "base").to(device)
    exchanges = [tokenise_exchange(one, tokenizer) for one in texts.chat]
    unseen = [tokenise_exchange(one, tokenizer) for one in texts.prompts[:: len(texts.prompts) // HELD_OUT_ROWS]]
    pad = tokenizer.pad_token_id

    def losses(batch: Sequence[Exchange]) -> dict[str, Tensor]:
        return {"answer": answer_loss(trunk, *(tensor.to(device) for tensor in padded(batch, pad)))}

    before = held_out_loss(trunk, unseen, pad)
    num_steps = int(size.finetune_epochs * len(exchanges) / size.finetune_rows)
    log = train(trunk, batches_by_length(exchanges, size.finetune_rows), losses, size.finetune, num_steps=num_steps)
    note = {
        "settings": asdict(size.finetune),
        "seed": SEED,
        "rows_per_step": size.finetune_rows,
        "trained_tokens": int(size.finetune_epochs * sum(len(one.tokens) for one in exchanges)),
        "mean_answer_tokens": sum(one.answer_end - one.answer_start for one in exchanges) / len(exchanges),
        "held_out_loss": {"before": before, "after": held_out_loss(trunk, unseen, pad)},
        "log": log,
    }
    save_finetune(trunk, tokenizer, work / "finetune")
    write_json(work / "finetune.json", note)


def batches_by_length(exchanges: Sequence[Exchange], rows: int) -> Iterator[list[Exchange]]:
    """Yield batches of similar length (for little padding) in random order, for all epochs."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(exchanges), generator=generator).tolist()
        pools = [order[start : start + 16 * rows] for start in range(0, len(order), 16 * rows)]
        batches: list[list[Exchange]] = []
        for pool in pools:
            pool.sort(key=lambda index: len(exchanges[index].tokens))
            for start in range(0, len(pool), rows):
                batches.append([exchanges[index] for index in pool[start : start + rows]])
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
        # The row of the token before the answer predicts the answer's first token.
        targets_BT[row, one.answer_start - 1 : one.answer_end - 1] = tokens_BT[row, one.answer_start : one.answer_end]
    return tokens_BT, targets_BT, mask_BT


@torch.no_grad()
def held_out_loss(trunk: PreTrainedModel, exchanges: Sequence[Exchange], pad: int) -> float:
    """Return the mean loss per answer token."""
    trunk.eval()
    total, count = 0.0, 0
    for start in range(0, len(exchanges), HELD_OUT_BATCH):
        tokens_BT, targets_BT, mask_BT = (
            tensor.to(trunk.device) for tensor in padded(exchanges[start : start + HELD_OUT_BATCH], pad)
        )
        num = int((targets_BT != IGNORED).sum())
        total += float(answer_loss(trunk, tokens_BT, targets_BT, mask_BT)) * num
        count += num
    return total / count


def read_samples(
    work: Path, texts: Texts, device: torch.device, *, num_prompts: int, max_new_tokens: int
) -> dict[str, Any]:
    """Decode answers of the fine-tune to held-out prompts, and return the figures of :mod:`demo_maker.sanity`."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(work / "finetune")
    trunk = load_trunk_to_train(work / "finetune").to(device).eval()
    chosen = texts.prompts[:: math.ceil(len(texts.prompts) / num_prompts)]
    return answer_figures(trunk, tokenizer, chosen, max_new_tokens)
