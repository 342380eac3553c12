"""Load the tokenizer of a checkpoint, and turn prompts into token ids."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from mtp_train.checkpoints.adapter import merge_command, tokenizer_files
from mtp_train.checkpoints.files import CONFIG_FILE, GENERATION_CONFIG_FILE, REJECTIONS, Checkpoint, read_json
from mtp_train.errors import CheckpointError, DataError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Variables = Mapping[str, Any]
"""What a chat template reads beside the messages, by name."""
NO_VARIABLES: Variables = MappingProxyType({})


def load_tokenizer(checkpoint: Checkpoint, adapter: Path | None = None) -> Any:
    """Load the tokenizer of a checkpoint, or the one that an adapter on it was saved with.

    Raises:
        CheckpointError: There is no tokenizer that transformers can load, or the checkpoint has no embedding for a
            token that the adapter adds.
    """
    files = {} if adapter is None else tokenizer_files(checkpoint.path, adapter)
    if not files:
        return _load(checkpoint)
    tell_once(f"tokenizer: {', '.join(sorted(files))} of {adapter}, instead of the files of {checkpoint.path}")
    with TemporaryDirectory() as scratch:
        beside = {file.name: file for pattern in (CONFIG_FILE, "*.py") for file in checkpoint.path.glob(pattern)}
        for name, file in {**beside, **files}.items():
            (Path(scratch) / name).parent.mkdir(exist_ok=True)
            (Path(scratch) / name).symlink_to(file.resolve())
        try:
            tokenizer = _load(replace(checkpoint, path=Path(scratch)))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(scratch, str(adapter))) from None
    tokenizer.name_or_path = str(adapter)
    command = merge_command(str(checkpoint.path), str(adapter))
    hint = f"Run '{command}' if the adapter contains its embeddings."
    _require_rows(checkpoint, tokenizer, lambda: _load(checkpoint).get_vocab(), hint)
    return tokenizer


tell_once = lru_cache(logger.warning)


def _require_rows(checkpoint: Checkpoint, tokenizer: Any, others: Callable[[], Collection[str]], hint: str) -> None:
    """Check that a checkpoint has an embedding for every token of a tokenizer but ``others``."""
    rows = checkpoint.text_config.get("vocab_size")
    ids = tokenizer.get_vocab().items() if isinstance(rows, int) else ()
    beyond = {token: number for token, number in ids if number >= rows}
    if added := beyond.keys() - (others() if beyond else ()):
        token = min(added, key=beyond.__getitem__)
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer has the id {beyond[token]} for {token!r} ({len(added)} such "
            f"tokens), and {checkpoint.path} has {rows} embeddings; expected a row for each token. {hint}"
        )


def _load(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    files = {name: read_json(checkpoint.path / name) for name in _TOKENIZER_FILES if (checkpoint.path / name).exists()}
    longest = files.get("tokenizer_config.json", {}).get("model_max_length")
    if longest is not None and not isinstance(longest, int | float):
        raise CheckpointError(
            f"{checkpoint.path / 'tokenizer_config.json'}: model_max_length is {longest!r:.60}; expected a number. "
            "Correct the field, or copy the file from the base."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=checkpoint.trusts_code)
    except Exception as error:
        # The tokenizers package raises Exception itself for a file that it cannot parse. A subclass that is not listed
        # here is a bug.
        if type(error) is not Exception and not isinstance(error, (*REJECTIONS, RuntimeError, ImportError)):
            raise
        reason = one_line(error)
        raise CheckpointError(
            f"{checkpoint.path}: no tokenizer that loads ({type(error).__name__}: {reason:.500}); expected tokenizer "
            "files beside the weights. Copy them from the base."
        ) from error
    # Without any file, transformers builds the tokenizer of the model type with no vocabulary.
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        raise CheckpointError(
            f"{checkpoint.path}: no tokenizer that loads (no vocabulary); expected tokenizer files beside the weights. "
            "Copy them from the base."
        )
    # Gemma 3's text models have a tokenizer with a token for images, and no embedding for it. The decoder refuses a
    # prompt with such a token.
    _require_rows(checkpoint, tokenizer, tokenizer.get_added_vocab, "Copy its files from the base.")
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a response: from the generation config (else the config) and the tokenizer."""
    file = checkpoint.path / GENERATION_CONFIG_FILE
    declaring = read_json(file) if file.is_file() else checkpoint.text_config
    declared = declaring.get("eos_token_id")
    found = [declared] if isinstance(declared, int) else declared or []
    return frozenset({*found, tokenizer.eos_token_id} - {None})


def raw_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True) -> list[int]:
    """Return the token ids of raw text, without the end-of-text token that some tokenizers append.

    Args:
        start: Whether the text opens a document. The begin-of-text token is then added if the tokenizer adds one.
    """
    token_ids = tokenizer(text, add_special_tokens=start, verbose=False)["input_ids"]
    is_closed = bool(token_ids) and token_ids[-1] == tokenizer.eos_token_id
    return token_ids[:-1] if is_closed and not text.endswith(str(tokenizer.eos_token)) else token_ids


def chat_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    variables: Variables = NO_VARIABLES,
) -> list[int]:
    """Return the token ids of a chat, up to and including the generation prompt for the assistant's next turn."""
    text = render_chat(tokenizer, messages, where, variables, add_generation_prompt=True)
    # The template writes the begin-of-text token itself.
    return raw_tokens(tokenizer, text, start=False)


def chat_template(tokenizer: PreTrainedTokenizerBase, where: str, variables: Variables = NO_VARIABLES) -> str:
    """Return the chat template of a tokenizer; some have another one for chats with tools."""
    try:
        template = tokenizer.get_chat_template(tools=variables.get("tools"))
    except ValueError as error:
        raise DataError(
            f"{where}: a chat, and the tokenizer has no chat template; expected one to write the chat with. Add "
            "chat_template.jinja to the trunk, or use prompt and response records."
        ) from error
    if not isinstance(template, str):
        raise DataError(
            f"{where}: the tokenizer's chat template is {type(template).__name__}; expected text. Correct "
            "chat_template in the trunk's tokenizer_config.json, or add chat_template.jinja."
        )
    return template


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    variables: Variables = NO_VARIABLES,
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of a chat as its template writes it.

    Args:
        variables: What the template reads beside the messages, such as ``tools``.
    """
    chat_template(tokenizer, where, variables)
    _require_free(tokenizer, variables, where)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    # A template, run in a sandbox, divides by zero or adds text to a number like any other program.
    except Exception as error:
        raise DataError(
            f"{where}: the chat template fails on it ({type(error).__name__}: {error!s:.300}); expected messages that "
            "it can write. Fix or remove the record, or correct chat_template.jinja in the trunk."
        ) from error
    return text


def _require_free(tokenizer: PreTrainedTokenizerBase, variables: Variables, where: str) -> None:
    if not variables:
        return
    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"tools", "documents", "kwargs"}
    found = sorted(variables.keys() & (taken | {"messages"}))
    if found:
        raise DataError(
            f"{where}: chat_template_kwargs has {found[0]}, which is set here; expected variables of the template. "
            "Leave it out."
        )


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the variables that the chat templates of a tokenizer read and that are not set here.

    Empty without a template that compiles.
    """
    templates = tokenizer.chat_template
    found = set[str]()
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        if isinstance(template, str):
            # The tag is known to transformers only.
            source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
            try:
                tree = environment.parse(source)
                found |= jinja2.meta.find_undeclared_variables(tree) - _own_names(tree)
            except jinja2.TemplateError:
                # Reported when a chat is rendered.
                continue
    return frozenset(found - _SET_HERE - environment.globals.keys() - tokenizer.special_tokens_map.keys())


def _own_names(tree: nodes.Template) -> set[str]:
    """Return the names that a template sets itself, without those that it sets only where they are not defined.

    Jinja counts a name that is set in one branch as undeclared.
    """
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    tests = [test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    return stored - {test.node.name for test in tests if isinstance(test.node, nodes.Name)}


def require_variables(tokenizer: PreTrainedTokenizerBase, variables: Variables, field: str) -> None:
    """Check that the chat template reads variables that the user set."""
    known = template_variables(tokenizer)
    _require_free(tokenizer, variables, field)
    for name in variables:
        if name not in known:
            raise DataError(
                f"{field}: {name!r}, which the chat template does not read; expected "
                f"{', '.join(sorted(known)) or 'none, as it reads no variable'}. Correct the name, or leave it out."
            )


_SET_HERE = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
