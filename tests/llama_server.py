"""Servers that answer as llama-server does, with counts of drafts that a test defines, and prompts for them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

from mtp_train.checkpoints.demo import demo_path
from openai_server import Reply, ReplyFn, Served, completion, openai_server

GROUPS, NEW_TOKENS = 8, 41


def llama(accepted: int, *, text: str = "the same", ms_per_token: float = 1.0) -> ReplyFn:
    """Answer as llama-server does: ``accepted`` drafts of three in most rounds, none drafted where it is -1."""

    def reply(payload: dict[str, Any]) -> Reply:
        rounds = (NEW_TOKENS - 1 - len(payload["prompt"]) % 3) // (1 + max(0, accepted))
        timings = {"predicted_n": NEW_TOKENS, "prompt_ms": 1.0, "predicted_ms": NEW_TOKENS * ms_per_token}
        if accepted >= 0:
            timings |= {"draft_n": 3 * rounds, "draft_n_accepted": NEW_TOKENS - 1 - rounds}
        document = json.loads(completion(text, "length").body)
        return Reply(body=json.dumps({**document, "timings": timings}).encode())

    return reply


def serving(reply: ReplyFn) -> AbstractContextManager[Served]:
    props = json.dumps({"model_path": str(demo_path("finetune"))})
    return openai_server(reply, owner="llamacpp", shows={"/props": lambda: props})
