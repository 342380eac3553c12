"""Load the tokenizer of a checkpoint, and turn prompts into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mtp_train.errors import CheckpointError, DataError
from mtp_train.weights.files import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """Load the tokenizer from the directory of a checkpoint.

    Raises:
        CheckpointError: The directory has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: no tokenizer that loads ({error}); expected tokenizer files beside the weights. Copy "
            "them from the base."
        ) from None


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a response: from the generation config (else the config) and the tokenizer."""
    from transformers import GenerationConfig

    found: set[int] = set()
    try:
        declared = GenerationConfig.from_pretrained(checkpoint.path).eos_token_id
    except OSError:
        declared = checkpoint.text_config.get("eos_token_id")
    found.update([declared] if isinstance(declared, int) else declared or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def raw_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True) -> list[int]:
    """Return the token ids of raw text, without the end-of-text token that some tokenizers append.

    Args:
        tokenizer: The trunk's tokenizer.
        text: Raw text.
        start: Whether the text opens a document. The begin-of-text token is then added if the tokenizer adds one.
    """
    token_ids: list[int] = tokenizer(text, add_special_tokens=start, verbose=False)["input_ids"]
    is_closed = bool(token_ids) and token_ids[-1] == tokenizer.eos_token_id
    return token_ids[:-1] if is_closed and not text.endswith(str(tokenizer.eos_token)) else token_ids


def chat_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str
) -> list[int]:
    """Return the token ids of a chat, up to and including the generation prompt for the assistant's next turn.

    Raises:
        DataError: The tokenizer has no chat template, or the template refuses the messages.
    """
    chat_template(tokenizer, where)
    text = render_chat(tokenizer, messages, where, add_generation_prompt=True)
    # The template writes the begin-of-text token itself.
    return raw_tokens(tokenizer, text, start=False)


def chat_template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """Return the chat template of a tokenizer.

    Raises:
        DataError: The tokenizer has none.
    """
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"{where}: a chat, and the tokenizer has no chat template; expected one to write the chat with. Add "
            "chat_template.jinja to the trunk, or use prompt and response records."
        ) from error
    return template


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of a chat as its template writes it.

    Raises:
        DataError: The template refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise DataError(
            f"{where}: the chat template refuses it ({error}); expected messages it can write. Fix or remove the "
            "record."
        ) from error
    return str(text)
