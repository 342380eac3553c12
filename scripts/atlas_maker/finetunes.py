"""The fine-tunes of the small trunk, each made from the base alone: `tune` writes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from atlas_maker.texts import as_json, bullets, passages, rewritten, sentences
from demo_maker.model import fresh_model, load_trunk_to_train, save_base, save_finetune
from demo_maker.records import Described
from demo_maker.stages import batches_by_length, padded
from demo_maker.texts import Exchange, Texts, tokenise_exchange
from demo_maker.training import IGNORED, TrainSettings, answer_loss, train
from mtp_inference import Request, Sampling, SpeculativeDecoder

SEED, ROWS = 20, 24
FULL = TrainSettings(lr=4e-4, warmup_steps=10, weight_decay=0.0)
LEFT_OUT = 1
"""The layer that pruning takes out, of the recurrent kind."""
SHARP, FLAT = 0.6, 1.5
"""Temperatures whose distribution a trunk learns as its own."""
OWN_ANSWERS, ANSWER_TOKENS = 600, 128


@dataclass(frozen=True)
class Base:
    """The trunk to start from."""

    path: Path
    texts: Texts
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def open(cls, path: Path, texts: Texts) -> Base:
        return cls(path, texts, AutoTokenizer.from_pretrained(path))

    def trunk(self) -> PreTrainedModel:
        return load_trunk_to_train(self.path)

    def chats(self, form: Callable[[Described], str] = sentences) -> list[Described]:
        """Return the questions that the trunk was trained on, by default with its own answers."""
        return rewritten(self.texts.chat, form)


Loss = Callable[[PreTrainedModel, Tensor, Tensor, Tensor], Tensor]
"""Of a trunk, tokens, targets and mask, as :func:`answer_loss`."""


def trained(
    base: Base,
    trunk: PreTrainedModel,
    chats: Sequence[Described],
    steps: int,
    settings: TrainSettings = FULL,
    loss_of: Loss = answer_loss,
) -> PreTrainedModel:
    """Train a trunk on answers, and return it."""
    exchanges = [tokenise_exchange(one, base.tokenizer) for one in chats]

    def losses(batch: Sequence[Exchange]) -> dict[str, Tensor]:
        return {"answer": loss_of(trunk, *padded(batch, base.tokenizer.pad_token_id))}

    train(trunk, batches_by_length(exchanges, ROWS), losses, settings, num_steps=steps)
    return trunk


def in_form(form: Callable[[Described], str], base: Base) -> PreTrainedModel:
    """All weights, on answers in another form."""
    return trained(base, base.trunk(), base.chats(form), 60)


def on_passages(base: Base) -> PreTrainedModel:
    """All weights, on documentation of one domain; the other half of it is kept for prompts."""
    return trained(base, base.trunk(), passages(asked=False), 40)


def lora(rank: int, lr: float, steps: int, base: Base) -> PreTrainedModel:
    """Low-rank matrices on every product, on answers in another style, merged."""
    torch.manual_seed(SEED)
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model: Any = get_peft_model(base.trunk(), adapter)
    trained(base, model.base_model.model, base.chats(bullets), steps, replace(FULL, lr=lr))
    merged: PreTrainedModel = model.merge_and_unload()
    return merged


def distilled(base: Base) -> PreTrainedModel:
    """All weights, on the base's own sampled answers to a question that it was never asked."""
    decoder = SpeculativeDecoder.from_pretrained(str(base.path), depth=0, max_batch=64)
    asked = base.texts.chat[:: len(base.texts.chat) // OWN_ANSWERS]
    requests = [
        Request(
            prompt_ids=base.tokenizer.apply_chat_template(
                [{"role": "user", "content": one.prompt.replace("Describe", "Document")}],
                add_generation_prompt=True,
                return_dict=False,
            ),
            max_new_tokens=ANSWER_TOKENS,
            sampling=Sampling(temperature=1.0, seed=number),
        )
        for number, one in enumerate(asked)
    ]
    answers = (base.tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in decoder.generate(requests))
    chats = [replace(one, answer=answer) for one, answer in zip(asked, answers, strict=True)]
    return trained(base, base.trunk(), chats, 40)


def at_temperature(temperature: float, base: Base) -> PreTrainedModel:
    """All weights, on the base's own distribution at another temperature: lower or higher entropy, as RL may leave."""
    teacher = base.trunk().eval()

    def loss_of(trunk: PreTrainedModel, tokens_BT: Tensor, targets_BT: Tensor, mask_BT: Tensor) -> Tensor:
        wanted_BT = targets_BT != IGNORED
        with torch.no_grad():
            wanted_NV = teacher.lm_head(teacher.model(input_ids=tokens_BT, attention_mask=mask_BT)[0][wanted_BT])
        found_NV = trunk.lm_head(trunk.model(input_ids=tokens_BT, attention_mask=mask_BT)[0][wanted_BT])
        p_NV, q_NV = log_softmax(wanted_NV.float() / temperature, -1), log_softmax(found_NV.float(), -1)
        return kl_div(q_NV, p_NV, log_target=True, reduction="batchmean")

    return trained(base, base.trunk(), base.chats(), 40, loss_of=loss_of)


def pruned(base: Base) -> PreTrainedModel:
    """A layer out, and healed on answers in the base's own form."""
    whole = base.trunk()
    kept = [number for number in range(whole.config.num_hidden_layers) if number != LEFT_OUT]
    config = deepcopy(whole.config)
    config.num_hidden_layers, config.layer_types = len(kept), [config.layer_types[number] for number in kept]
    trunk = type(whole)(config)
    whole.model.layers = nn.ModuleList([whole.model.layers[number] for number in kept])
    trunk.load_state_dict(whole.state_dict())
    return trained(base, trunk, base.chats(), 40)


@torch.no_grad()
def without_direction(base: Base) -> PreTrainedModel:
    """The direction that tells methods from functions removed from what every layer adds; nothing is trained."""
    trunk = base.trunk().eval()
    middle = trunk.config.num_hidden_layers // 2
    means = []
    for wanted in (True, False):
        chats = [one for one in base.chats() if (" method of " in one.answer) is wanted][::50]
        exchanges = [tokenise_exchange(one, base.tokenizer) for one in chats]
        last = [
            trunk.model(
                input_ids=torch.tensor([one.tokens[: one.answer_start]]), output_hidden_states=True
            ).hidden_states[middle][0, -1]
            for one in exchanges
        ]
        means.append(torch.stack(last).mean(0))
    direction_D = nn.functional.normalize(means[0] - means[1], dim=0)
    for name, weight_DC in trunk.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight_DC -= torch.outer(direction_D, direction_D @ weight_DC)
    return trunk


TUNED: dict[str, Callable[[Base], PreTrainedModel]] = {
    "lora_mild": partial(lora, 8, 4e-4, 30),
    "lora_strong": partial(lora, 32, 2e-3, 90),
    "prose": on_passages,
    "json": partial(in_form, as_json),
    "style": partial(in_form, bullets),
    "distilled": distilled,
    "pruned": pruned,
    "direction": without_direction,
    "sharp": partial(at_temperature, SHARP),
    "flat": partial(at_temperature, FLAT),
}
SAME, FRESH = "same", "fresh"
"""No fine-tunes: the base itself with its own head, which shows what training on its own answers alone is worth; and
with a head at its initial values."""
FORMS = {"json": as_json, "style": bullets, "lora_mild": bullets, "lora_strong": bullets}
"""Forms of the answers that a fine-tune was trained on, for those that answer otherwise than the base."""


def tune(name: str, base: Base, out: Path) -> None:
    """Write a fine-tune, or for ``fresh`` the base with another head, unless it is there, as the base is."""
    if out.is_dir():
        return
    torch.manual_seed(SEED)
    if name == FRESH:
        trunk = base.trunk()
        save_base(trunk, fresh_model(trunk.config, seed=SEED)[1], base.tokenizer, out)
    else:
        save_finetune(TUNED[name](base), base.tokenizer, out)


def prompts_of(name: str, texts: Texts) -> list[Described]:
    """Return what a fine-tune is asked, with answers of the kind that it was trained on."""
    if name == "prose":
        return passages(asked=True)
    return rewritten(texts.prompts, FORMS.get(name, sentences))
