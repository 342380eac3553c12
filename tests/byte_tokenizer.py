"""A tokenizer of one token per byte, built in memory, so that tests can read token ids as text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_STRIPS_THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_NEVER_THINKS_ALOUD = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CHATML_REFUSES = "{{ raise_exception('roles must alternate') }}"
THINKS = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}<|im_end|>\n"
    "{% endif %}{%- for message in messages %}{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}"
    '{%- for call in message.tool_calls %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{%- endfor %}<|im_end|>\n{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{%- endif %}"
)
"""Shaped after Qwen3: tools in the system turn, thinking that a variable switches off."""


def byte_tokenizer(chat_template: str | None = CHATML, *, eos: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Return a tokenizer whose only merge is the one of two line ends (it can straddle the end of a prompt)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "\u010a\u010a"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u010a", "\u010a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = chat_template
    return tokenizer


OPENS, CLOSES = "<|im_start|> $A", "$A <|im_end|>"


def adding_tokenizer(single: str, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer that adds a special token to raw text, as ``OPENS`` or ``CLOSES`` shows."""
    tokenizer = byte_tokenizer(chat_template)
    names = ("<|im_start|>", "<|im_end|>")
    special_tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    processor = TemplateProcessing(single=single, special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer
