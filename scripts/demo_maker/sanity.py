"""Check the answers of the fine-tune: valid JSON, ended by EOS, without loops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from demo_maker.records import Described
from mtp_train.acceptance.counts import repeated_ngram_share


@torch.inference_mode()
def answer_figures(
    trunk: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Described], max_new_tokens: int
) -> dict[str, Any]:
    """Decode prompts greedily; return shares of good answers, and some answers to read."""
    answers: list[list[int]] = []
    for one in prompts:
        inputs = tokenizer.apply_chat_template(
            one.messages()[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(trunk.device)
        output = trunk.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    records = [_record(text) for text in texts]
    names = [json.loads(one.answer)["name"] for one in prompts]
    return {
        "prompts": len(prompts),
        "mean_answer_tokens": sum(map(len, answers)) / len(answers),
        "ended_by_itself": _share([answer[-1] == tokenizer.eos_token_id for answer in answers]),
        "valid_json": _share([bool(record) for record in records]),
        "right_name": _share([record.get("name") == name for record, name in zip(records, names, strict=True)]),
        "repeated_8gram_share": repeated_ngram_share(answers, n=8),
        "examples": [{"prompt": prompts[index].prompt, "answer": texts[index]} for index in range(6)],
    }


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def _record(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; empty where there is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
