"""Render chat templates: programs of a checkpoint's author, which may fail, run without end or write without end.

transformers renders them in jinja2's immutable sandbox. The sandbox keeps a template from the files and attributes of
this process, and limits ``range``; it limits neither time nor memory. :func:`bounded` adds both limits to the program
that transformers compiled, and reports the errors that a template raises.

The time limit is a watchdog thread that raises an exception in the rendering thread. A signal would reach the main
thread only, a trace function would slow every line of every template, and a process per chat would cost more than the
rendering. The watchdog costs two dictionary updates per chat. It acts between two bytecodes: a single operation that
runs long inside of C is not interrupted. Operators, methods and filters whose results may be much larger than their
arguments are therefore checked before they run (``_LIMITED``, ``_METHODS`` and ``_FILTERS``). So are lists, tuples and
dicts where a template writes them, and where it makes text of them (:func:`_weighed`): ``[a, a]`` forty times over has
forty lists, and as a text more characters than any memory.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mtp_train.errors import DataError
from mtp_train.upstream.transformers_private import compiled_chat_template

MAX_SECONDS = 10.0
"""Longest time for one chat. A chat of a million tokens takes well under a second."""
MAX_CHARS = 1 << 26
"""Most characters of a rendered chat, about ten times the longest context of any model."""
_MAX_BITS = 1 << 16
_POLL_SECONDS = 0.1


class _TooLongError(BaseException):
    """Raised in a thread whose template does not end. Not an Exception: jinja2 rewrites those that pass through it."""


class _Watchdog:
    """Raise :class:`_TooLongError` in threads that stay longer than :data:`MAX_SECONDS` in :meth:`limit`."""

    def __init__(self) -> None:
        self._begin()
        # A fork copies neither the thread nor, maybe, an open lock.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._is_running = False

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Limit the time of a block, which must not contain another one."""
        thread = threading.get_ident()
        with self._lock:
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._watch, name="chat-template-watchdog", daemon=True).start()
            self._ends[thread] = time.monotonic() + MAX_SECONDS
        try:
            yield
        finally:
            with self._lock:
                expired = self._ends.pop(thread, None) is None
            if expired:
                # The exception may still be on its way: take it back, so that it cannot surface later.
                _raise_in(thread, None)
        if expired:
            raise _TooLongError

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                now = time.monotonic()
                for thread in [thread for thread, end in self._ends.items() if end < now]:
                    del self._ends[thread]
                    _raise_in(thread, _TooLongError)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an error at its next bytecode; None withdraws an error that it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


_WATCHDOG = _Watchdog()


@contextmanager
def bounded(template: str, where: str) -> Iterator[None]:
    """Limit the time and output of a chat template, which the block renders, and report its errors.

    Args:
        template: The template.
        where: The record, for messages.

    Raises:
        DataError: The template cannot be compiled, refuses the chat, fails on it, or exceeds a limit.
    """
    hint = "expected messages it can write. Fix or remove the record."
    try:
        with _WATCHDOG.limit():
            _limit_output(template)
            yield
    except TemplateError as error:
        raise DataError(f"{where}: the chat template refuses it ({error}); {hint}") from error
    except _TooLongError:
        raise DataError(
            f"{where}: the chat template did not end within {MAX_SECONDS:.0f} seconds; expected a template that writes "
            "the messages and ends. Correct chat_template.jinja in the trunk, or replace it by the base's."
        ) from None
    except DataError:
        raise
    # A template is a program: it divides by zero or adds text to a number like any other. Nothing of ours runs here.
    except Exception as error:
        raise DataError(
            f"{where}: the chat template fails on it ({type(error).__name__}: {error!s:.300}); expected a template "
            "that writes the messages. Correct chat_template.jinja in the trunk, or replace it by the base's."
        ) from error


@lru_cache(maxsize=64)
def _limit_output(template: str) -> None:
    """Give the template that transformers compiled operators and an output with limits.

    Raises:
        TemplateError: The template cannot be compiled, or contains a constant beyond the limits.
    """
    # jinja2 computes constant expressions when it compiles. Parsing does not.
    tree = compiled_chat_template("").environment.parse(template)
    for node in tree.find_all((nodes.BinExpr, nodes.Filter)):
        _constant(node)
    compiled = compiled_chat_template(template)
    environment: Any = compiled.environment
    environment.concat = _joined
    environment.intercepted_binops = frozenset(_LIMITED)
    environment.binop_table |= {operator: partial(_computed, operator) for operator in _LIMITED}
    environment.filters |= {name: _checked_filter(name, environment.filters[name]) for name in _FILTERS}
    environment.filters |= {name: _weighed_filter(environment.filters[name]) for name in _TEXTUAL}
    environment.filters[_WEIGHED] = _weighed
    environment.finalize = _weighed
    environment.call = partial(_called, environment.call)
    # Intercepted operators are calls in the compiled code; `~` is not among them.
    fresh = environment.from_string(_Checked().visit(environment.parse(template)))
    compiled.root_render_func, compiled.blocks = fresh.root_render_func, fresh.blocks


class _Checked(NodeTransformer):
    """Write ``a ~ b`` as ``a | string + b | string``, and weigh containers."""

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return nodes.Filter(self.generic_visit(node), _WEIGHED, [], [], None, None, lineno=node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return nodes.Filter(self.generic_visit(node), _WEIGHED, [], [], None, None, lineno=node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        kept = self.generic_visit(node)
        # The targets of a loop or an assignment are written as a tuple, too.
        return kept if node.ctx != "load" else nodes.Filter(kept, _WEIGHED, [], [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        texts = [
            nodes.Filter(self.visit(child), "string", [], [], None, None, lineno=node.lineno) for child in node.nodes
        ]
        joined: nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined


def _called(call: Callable[..., Any], context: Any, called: Any, *args: Any, **keywords: Any) -> Any:
    """Call a method or function from a template; ``call`` is the sandbox's own way.

    Raises:
        TemplateRuntimeError: The result would exceed the limits.
    """
    # The sandbox wraps the formatting methods of texts.
    method = inspect.unwrap(called)
    owner = getattr(method, "__self__", None)
    if isinstance(owner, str | bytes | int):
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        _METHODS.get(method.__name__, _limit_numbers)(owner, *args, **keywords)
    result = call(context, called, *args, **keywords)
    return _weighed(result) if called is context.environment.globals.get("dict") else result


def _weighed(value: Any) -> Any:
    """Return a value as it is, after a check of a list, a tuple or a dict.

    Raises:
        TemplateRuntimeError: It has more elements and characters than the limit, with all that is in it, as often as it
            occurs.
    """
    if isinstance(value, list | tuple | dict):
        _limit_elements(_weight(value, {}))
    return value


def _weight(value: Any, known: dict[int, int]) -> int:
    """Return the number of elements and characters of a value. Each container is visited once."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        parts = (one for pair in value.items() for one in pair) if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_weight(one, known) for one in parts)
    return known[id(value)]


def _weighed_filter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that makes text of its arguments, which are weighed first."""

    @wraps(original)
    def checked(*args: Any, **keywords: Any) -> Any:
        for one in (*args, *keywords.values()):
            _weighed(one)
        return original(*args, **keywords)

    return checked


def _checked_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the size of its result first.

    jinja2 marks filters that take its own state as first argument; ``wraps`` keeps the mark.
    """
    skipped = int(hasattr(original, "jinja_pass_arg"))

    @wraps(original)
    def checked(*args: Any, **keywords: Any) -> Any:
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        _FILTERS[name](*args[skipped:], **keywords)
        return original(*args, **keywords)

    return checked


def _constant(node: nodes.Node) -> Any:
    """Return the value of a constant expression within the limits; None for any other expression."""
    if isinstance(node, nodes.Const):
        return node.value
    if isinstance(node, nodes.Filter) and node.name in _FILTERS and node.node is not None:
        values = [_constant(one) for one in (node.node, *node.args)]
        named = {str(pair.key): _constant(pair.value) for pair in node.kwargs}
        if None not in (*values, *named.values()):
            _FILTERS[node.name](*values, **named)
        return None
    if not isinstance(node, nodes.BinExpr) or node.operator not in _COMPUTE:
        return None
    left, right = _constant(node.left), _constant(node.right)
    try:
        return None if left is None or right is None else _computed(node.operator, left, right)
    except (TypeError, ArithmeticError, ValueError):
        # The template fails where it is rendered, if that part of it is.
        return None


def _computed(operator: str, left: Any, right: Any) -> Any:
    """Return ``left operator right``.

    Raises:
        TemplateRuntimeError: The result would exceed the limits.
    """
    if operator in _LIMITED:
        _LIMITED[operator](left, right)
    return _COMPUTE[operator](left, right)


def _joined(parts: Iterable[str]) -> str:
    """Join text like ``"".join``, up to the limit."""
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARS:
            raise TemplateRuntimeError(f"it writes more than {MAX_CHARS} characters")
        if part:
            kept.append(part)
    return "".join(kept)


def _limit_product(left: Any, right: Any) -> None:
    for times, value in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | list | tuple):
            _limit_elements(times * len(value))
    if isinstance(left, int) and isinstance(right, int):
        _limit_digits(left.bit_length() + right.bit_length())


def _limit_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _limit_digits(left.bit_length() * abs(right))


def _limit_sum(left: Any, right: Any) -> None:
    if any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, list, tuple)):
        _limit_elements(len(left) + len(right))


def _limit_elements(count: int) -> None:
    if count > MAX_CHARS:
        raise TemplateRuntimeError(f"it makes a text or list of more than {MAX_CHARS} elements")


def _limit_digits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateRuntimeError(f"it makes a number of more than {_MAX_BITS} bits")


def _limit_percent(text: Any, values: Any) -> None:
    if isinstance(text, str | bytes):
        named = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else ()
        _limit_widths(_PERCENT_WIDTH.findall(str(text)), named if "*" in str(text) else ())


def _limit_percent_filter(text: Any, *values: Any, **named: Any) -> None:
    _limit_percent(str(text), named or values)


def _limit_format(text: str, *values: Any, **named: Any) -> None:
    _limit_widths(_BRACE_WIDTH.findall(text), (*values, *named.values()) if _NESTED_BRACE.search(text) else ())


def _limit_format_map(text: str, named: Mapping[str, Any]) -> None:
    _limit_format(text, *named.values())


def _limit_widths(written: Iterable[str], given: Iterable[Any]) -> None:
    """Limit the widths and precisions that a format has, or takes from its values."""
    for width in (*map(int, written), *given):
        if isinstance(width, int):
            _limit_elements(width)


def _limit_replace(text: Any, old: Any, new: Any, count: object = None) -> None:
    if not isinstance(text, bytes):
        text, old, new = str(text), str(old), str(new)
    _limit_elements(len(text) + text.count(old) * len(new))


def _limit_join(separator: Any, values: Any) -> None:
    _limit_elements(sum(len(separator) + len(one) for one in values))


def _limit_joined(values: Any, separator: Any = "", attribute: object = None) -> None:
    if attribute is None:
        _limit_elements(sum(len(str(separator)) + len(one if isinstance(one, str) else "") for one in values))


def _limit_translation(text: Any, table: Any, *others: Any) -> None:
    values = table.values() if isinstance(table, Mapping) else table
    _limit_elements(len(text) * max((len(one) for one in values if isinstance(one, str)), default=1))


def _limit_tabs(text: Any, tabsize: int = 8) -> None:
    _limit_elements(len(text) * max(1, tabsize))


def _limit_numbers(value: object, *args: object, **keywords: object) -> None:
    """Limit every number that is given to a filter or a method, as it may be a width or a count."""
    for number in (*args, *keywords.values()):
        if isinstance(number, int):
            _limit_elements(number)


def _limit_indents(value: object, *args: object, **keywords: object) -> None:
    """Limit the indentation of every line; no text has more lines than characters."""
    for number in (*args, *keywords.values()):
        if isinstance(number, int) and not isinstance(number, bool):
            _limit_elements(number * _weight(value, {}))


def _limit_precision(value: object, precision: int = 0, method: str = "common") -> None:
    _limit_digits(4 * abs(precision))


_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*?([0-9]{8,})")
_BRACE_WIDTH = re.compile(r"\{[^{}]*[:.][^{}]*?([0-9]{8,})")
_NESTED_BRACE = re.compile(r"\{[^{}]*\{")
_COMPUTE = SandboxedEnvironment.default_binop_table
_LIMITED: Mapping[str, Callable[[Any, Any], None]] = {
    "*": _limit_product,
    "**": _limit_power,
    "+": _limit_sum,
    "%": _limit_percent,
}
_METHODS: Mapping[str, Callable[..., None]] = {
    "replace": _limit_replace,
    "join": _limit_join,
    "format": _limit_format,
    "format_map": _limit_format_map,
    "translate": _limit_translation,
    "expandtabs": _limit_tabs,
}
"""Methods of texts whose results may be much larger than their arguments; numbers given to others are widths."""
_FILTERS: Mapping[str, Callable[..., None]] = {
    "replace": _limit_replace,
    "join": _limit_joined,
    "format": _limit_percent_filter,
    "batch": _limit_numbers,
    "center": _limit_numbers,
    "slice": _limit_numbers,
    "wordwrap": _limit_numbers,
    "indent": _limit_indents,
    "tojson": _limit_indents,
    "round": _limit_precision,
}
"""The same of filters."""
_TEXTUAL = (
    *("string", "replace", "join", "format", "center", "wordwrap", "indent", "tojson", "escape", "e", "forceescape"),
    *(
        "upper",
        "lower",
        "title",
        "capitalize",
        "trim",
        "striptags",
        "truncate",
        "urlize",
        "urlencode",
        "safe",
        "pprint",
    ),
)
"""Filters that make text of any value."""
_WEIGHED = "weighed by mtp_train"
