"""Chat templates are programs from anywhere: each failure is one message, and none runs or writes without end."""

from __future__ import annotations

import os
import threading

import pytest

from byte_tokenizer import CHATML, CHATML_MARKED, byte_tokenizer
from mtp_train.data.chat import chat_documents
from mtp_train.errors import DataError
from mtp_train.trunk import templates
from mtp_train.trunk.tokenizer import render_chat

MESSAGES = [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
ENDLESS = LOOPS.replace("BODY", LOOPS.replace("BODY", ""))
NESTED = "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = PAIR %}{% endfor %}"
SUMS = "{% set n = namespace(a=['x' * 60000]) %}{% for i in range(16) %}{% set n.a = n.a + n.a %}{% endfor %}"
HUGE = [
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    *(
        f"{{{{ messages[0].content.{call} }}}}"
        for call in ("ljust(10 ** 11)", "zfill(width=10 ** 11)", "rjust(10 ** 11)")
    ),
    "{{ 'a\tb'.expandtabs(tabsize=99999999) }}",
    "{{ (1).to_bytes(10 ** 11) }}",
    "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
    "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
    "{{ '-'.join(['x' * 60000000, 'x' * 60000000]) }}",
    "{{ ['x' * 60000000, 'x' * 60000000] | join('-') }}",
    "{{ messages | map(attribute='content') | join('x' * 67108864) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ messages[0].content[:0] ~ '%*d' % (10 ** 11, 1) }}",
    "{{ '%(n)99999999999d' | format(n=1) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10 ** 11) }}",
    "{{ '{:>{w}}{n}'.format_map({'w': 10 ** 11, 'n': 1}) }}",
    "{{ 'x' | center(10 ** 11) }}",
    "{{ messages[0].content | center(width=10 ** 11) }}",
    "{{ ('x\n' * 99) | indent(10 ** 7) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ [1] | batch(10 ** 11, 0) | list }}",
    "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
    *(f"{NESTED.replace('PAIR', pair)}{{{{ n.a | length }}}}" for pair in ("[n.a, n.a]", "(n.a, n.a)")),
    *(
        f"{NESTED.replace('PAIR', pair)}{{{{ n.a | length }}}}"
        for pair in ("{'b': n.a, 'c': n.a}", "dict(b=n.a, c=n.a)")
    ),
    # Lists that share a text grow by sums, which are weighed where they become text.
    *(f"{SUMS}{{{{ {text} }}}}" for text in ("n.a", "n.a | string", "n.a ~ 'x'", "n.a | tojson", "n.a | upper")),
]


def rendered(template: str) -> str:
    return render_chat(byte_tokenizer(template), MESSAGES, "chats.jsonl, line 3", add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it (roles must alternate)"),
        ("{% for %}", "refuses it (Expected an expression"),
        ("{{ 'a' | nope }}", "refuses it (No filter named 'nope'.)"),
        ("{{ ''.__class__.__mro__ }}", "refuses it (access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "fails on it (ZeroDivisionError: division by zero)"),
        ("{{ 1 + 'a' }}", "fails on it (TypeError: "),
        ("{{ 'a'.encode('nope') }}", "fails on it (LookupError: unknown encoding: nope)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on it (RecursionError: "),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "fails on it (RecursionError: "),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "fails on it (OverflowError: Range too big"),
        ("{% include 'x' %}", "fails on it (TypeError: no loader"),
        # Constants are computed when a template is compiled, other expressions when it is rendered.
        ("{{ 'x' * 10 ** 13 }}", "refuses it (it makes a text or list of more than 67108864 elements)"),
        ("{{ messages[0].role * 10 ** 13 }}", "refuses it (it makes a text or list of more than 67108864 elements)"),
        ("{{ 10 ** (10 ** 10) }}", "refuses it (it makes a number of more than 65536 bits)"),
        ("{{ (messages | length) ** (10 ** 10) }}", "refuses it (it makes a number of more than 65536 bits)"),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "refuses it (it makes a text or list of more than 67108864 elements)",
        ),
        # A single operation in C cannot be interrupted: it is refused before it runs.
        *((template, "than 67108864 elements") for template in HUGE),
        ("{{ 1.5 | round(10 ** 9) }}", "refuses it (it makes a number of more than 65536 bits)"),
        ("{{ (messages | length) | round(precision=10 ** 9, method='ceil') }}", "of more than 65536 bits"),
        (LOOPS.replace("BODY", "x" * 999), "refuses it (it writes more than 67108864 characters)"),
    ],
)
def test_whatever_a_template_raises_is_one_message(template: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        rendered(template)
    assert str(caught.value).startswith("chats.jsonl, line 3: the chat template ")
    assert message in str(caught.value)
    assert "; expected" in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML_MARKED,
        "{{ '-' * 3 ~ (1 + 2) ** 2 }}{{ [1] + [2] }}{{ messages[0].content + '!' }}{{ 7 // 2 * 1.5 }}",
        "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{{ n.i }}{% endfor %}",
        "{{ 'a' ~ 1 ~ none ~ missing ~ messages[0].content ~ [1] ~ 1.5 }}{{ 1 ~ (2 + 3) }}",
        "{{ 'a-b'.replace('-', '+', 1) }}{{ 'a' | replace(1, 2) }}{{ missing | replace('a', 'b') }}{{ 'x'.ljust(5) }}|",
        "{{ messages | map(attribute='content') | join(', ') }}{{ ','.join(['a', 'b']) }}{{ [1, 2] | join('-') }}",
        "{{ '%5d|%s' % (10 ** 12, 'x') }}{{ '%s' | format(9) }}{{ 'at:999999999 {} {:>5}'.format(10 ** 12, 1) }}",
        "{{ messages | tojson(indent=2) }}{{ messages | tojson }}{{ 2.567 | round(2) }}{{ 'a\nb' | indent(4, true) }}",
        "{% for a, b in {'x': [1, (2, 3)], 'y': {}}.items() %}{{ a }}{{ b }}{{ (a, b) }}{% endfor %}{{ dict(a=[1]) }}",
        "{% set a, b = 1, [[]] %}{{ [a, b] }}{{ 2 in [1, 2] }}{{ messages }}{{ messages[-1:] | length }}{{ none }}",
        "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 'x' | center(5) }}{{ 'a' | upper }}",
    ],
)
def test_limits_leave_the_text_of_other_templates_as_it_is(template: str) -> None:
    expected = "".join(byte_tokenizer(template).apply_chat_template([dict(one) for one in MESSAGES], tokenize=False))
    assert rendered(template) == expected
    assert rendered(template) == expected


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)


@pytest.mark.usefixtures("short")
def test_a_template_without_end_is_stopped_in_the_main_thread_and_in_others() -> None:
    found: list[str] = []

    def render() -> None:
        with pytest.raises(DataError, match="did not end within 0 seconds; expected a template that writes") as caught:
            rendered(ENDLESS)
        found.append(str(caught.value))

    render()
    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    # The watchdog goes on, and lets templates that end pass.
    assert "say 1" in rendered(CHATML)


@pytest.mark.usefixtures("short")
def test_a_marked_template_without_end_is_stopped_too() -> None:
    marked = ENDLESS + CHATML_MARKED
    with pytest.raises(DataError, match="did not end within"):
        chat_documents(byte_tokenizer(marked), MESSAGES, "chats.jsonl")


@pytest.mark.usefixtures("short")
def test_a_stop_that_comes_after_the_end_does_not_surface_later() -> None:
    """The block ends between the watchdog's decision and the delivery: the error is raised there, once."""
    watchdog = templates._Watchdog()

    def wait() -> None:
        with watchdog.limit():
            while watchdog._ends:
                pass

    for _ in range(5):
        with pytest.raises(templates._TooLongError):
            wait()
    for number in range(100_000):
        assert number >= 0


@pytest.mark.usefixtures("short")
def test_a_forked_process_gets_a_watchdog_of_its_own() -> None:
    rendered(CHATML)
    # Only a bare fork copies this process's state without its threads, as workers of datasets do.
    child = os.fork()
    if not child:
        try:
            rendered(ENDLESS)
        except DataError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_template_that_is_no_text_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = 3
    with pytest.raises(DataError, match="the tokenizer's chat template is int; expected text"):
        render_chat(tokenizer, MESSAGES, "chats.jsonl", add_generation_prompt=False)
