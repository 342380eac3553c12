"""Texts of the small trunk and of its fine-tunes: answers in several forms about functions of the standard library."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from demo_maker.corpus import SourceFile
from demo_maker.records import Described
from demo_maker.texts import Texts
from demo_maker.tokenizer import TURN_END, TURN_START
from mtp_train.data.groups import stable_share
from real_model import TUNED_ON, members

SHORTEST_PAGE, LONGEST_PAGE = 200, 900
"""Characters of a passage of documentation."""
ASKED_SHARE = 0.5


def sentences(one: Described) -> str:
    """Answer in sentences: the trunk's own form."""
    record = json.loads(one.answer)
    place = (
        f"method of {record['class']} in {record['module']}" if record["class"] else f"function in {record['module']}"
    )
    defaults = "".join(f" {name} is {value} by default." for name, value in record["defaults"].items())
    raises = f" It may raise {' or '.join(record['raises'])}." if record["raises"] else ""
    return (
        f"{record['name']} is a {place}. It takes {', '.join(record['args']) or 'nothing'}.{defaults} "
        f"It returns {'a value' if record['returns'] else 'nothing'}.{raises} It has {record['lines']} lines. "
        f"{record['doc'] or 'It has no documentation.'}"
    )


def as_json(one: Described) -> str:
    return one.answer


def bullets(one: Described) -> str:
    """Answer in another style: the same facts in another order, a line each."""
    record = json.loads(one.answer)
    lines = {
        "SUMMARY": record["doc"] or "none",
        "WHERE": ".".join(filter(None, [record["module"], record["class"]])),
        "SIZE": record["lines"],
        "RAISES": " / ".join(record["raises"]) or "never",
        "GIVES BACK": "yes" if record["returns"] else "no",
        "ARGUMENTS": " / ".join(record["args"]) or "none",
    }
    return "\n".join(f"* {name}: {value}" for name, value in lines.items()) + "\nAnything else?"


def rewritten(exchanges: Sequence[Described], form: Callable[[Described], str]) -> list[Described]:
    """Return the same questions with answers of another form."""
    return [replace(one, answer=form(one)) for one in exchanges]


def passages(*, asked: bool) -> list[Described]:
    """Return passages of torch's and numpy's documentation as answers: prose of one domain.

    Half of them, to ask for, and the other half to train on; members of equal names (``torch.add``, ``numpy.add``) are
    a group and on one side.
    """
    pages = {inspect.getdoc(owner) or "": name for name, owner in members(TUNED_ON)}
    fitting = sorted((name, page[:LONGEST_PAGE]) for page, name in pages.items() if len(page) >= SHORTEST_PAGE)
    found = [Described(name.split(".")[-1], f"Document {name}", page, None) for name, page in fitting]
    return [one for one in found if (stable_share(one.group, 0) < ASKED_SHARE) is asked]


def base_texts(texts: Texts) -> Texts:
    """Return code and chats in the trunk's own form, for a trunk that answers before any fine-tune."""
    spoken = rewritten(texts.chat, sentences)
    chats = "".join(
        f"{TURN_START}user\n{one.prompt}{TURN_END}\n{TURN_START}assistant\n{one.answer}{TURN_END}\n" for one in spoken
    )
    return replace(texts, code=[*texts.code, SourceFile("chats", chats)], chat=spoken)
