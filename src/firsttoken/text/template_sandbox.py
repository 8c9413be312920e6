"""The Jinja environment that chat templates run in: sandboxed, and bounded in time and memory.

Jinja's own sandbox keeps a template away from Python, not from the processor: nested loops, doubling strings or
``10 ** 10 ** 10`` still run. Everything in a template that can multiply work passes one of the hooks below, each of
which spends from the render's `Budget`:

- every ``for`` loop counts its rounds (its iterable is wrapped when the template is parsed);
- every call, macros and loop recursion included, counts as a round;
- ``*``, ``+``, ``**``, ``%``, ``~`` and the methods and filters that build strings pay for the length of what they
  build *before* they build it;
- everything written is paid for, also inside macros and ``set`` blocks.

Filters and string methods that are not listed do not exist.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from functools import wraps
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_round
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from firsttoken.text.control_tokens import Twins

MAX_RANGE = 10_000
MAX_ITEMS = 200_000
_CHARACTERS_PER_ROUND = 256
_CHECK_EVERY = 16

_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"}
    | {"length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr"}
    | {"sort", "title", "trim", "unique", "upper", "wordcount"}
)
_STRING_METHODS = frozenset(
    {"capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii"}
    | {"isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip"}
    | {"partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"}
    | {"split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"}
)
# A width of many digits, or one taken from an argument, makes a short format string write gigabytes.
_NO_ASCII = re.compile(r"[^\x00-\x7f]")
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")


class TemplateLimit(SecurityError):
    """A template wanted more time or memory than it may have."""


class TemplateRaised(TemplateError):
    """The template called ``raise_exception``: the conversation is not one it can render."""


class Budget:
    """What one render may still spend: rounds, and processor time of its thread.

    A round is one turn of a loop or one call; building a text costs one for each 256 characters.
    """

    __slots__ = ("_deadline", "_next_check", "_rounds", "_time_ns")

    def __init__(self, *, rounds: int, time_ns: int) -> None:
        self._rounds = rounds
        self._time_ns = time_ns
        self._deadline: int | None = None  # counted from the first check: a short render ends before it
        self._next_check = rounds - _CHECK_EVERY

    def spend(self, characters: int = 0) -> None:
        """Pay for one round that builds a text (or list) of that length; raises `TemplateLimit` when spent."""
        self._rounds -= 1 + characters // _CHARACTERS_PER_ROUND
        if self._rounds > self._next_check:
            return
        self._next_check = self._rounds - _CHECK_EVERY
        if self._rounds <= 0:
            raise TemplateLimit("the chat template does more work than a conversation of this size needs")
        now = thread_time_ns()
        if self._deadline is None:
            self._deadline = now + self._time_ns
        elif now > self._deadline:
            raise TemplateLimit("the chat template took too long")


class _Rounds:
    """An iterable whose iteration spends rounds; its length, if it has one, stays visible to ``loop.length``."""

    __slots__ = ("_budget", "_items")

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items = items
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError is the answer that Jinja handles

    def __iter__(self) -> Iterator[Any]:
        spend = self._budget.spend
        for item in self._items:
            spend()
            yield item


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One per template. A render runs in one thread, between `begin` and `end`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            # Folding constants would run the template's arithmetic at load time, outside any budget.
            optimized=False,
            finalize=_finalize,
        )
        self._thread = threading.local()
        own: dict[str, Callable[..., Any]] = {
            "tojson": self._tojson,
            "string": self.text_of,
            "safe": self.text_of,
            "join": self._join,
            "replace": self._replace,
            "indent": self._indent,
            "round": _round,
            "_rounds": self._counted,
            "_shown": self._shown,
            "_concat": self._concat,
        }
        self.filters = {name: self._metered(self.filters[name]) for name in _FILTERS} | own
        self.globals = {name: self.globals[name] for name in ("namespace", "joiner", "cycler", "dict")} | {
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def begin(self, budget: Budget, twins: Twins | None = None) -> None:
        """``twins`` stand for characters of the texts that the template is given (`control_tokens`)."""
        self._thread.budget = budget
        self._thread.twins = twins

    def end(self) -> None:
        self._thread.budget = self._thread.twins = None

    @property
    def budget(self) -> Budget:
        budget: Budget = self._thread.budget
        return budget

    # ------------------------------------------------------------- at parse time

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_rounds", [], [], None, None, lineno=loop.lineno)
        for parent in [tree, *tree.find_all(nodes.Node)]:
            _replace_children(parent, nodes.Concat, _bounded_concat)
        for comparison in list(tree.find_all(nodes.Compare)):
            _show_operands(comparison)
        tree.set_environment(self)
        return tree

    # ------------------------------------------------------------ at render time

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if not isinstance(owner, str):
            __self.budget.spend()
            return super().call(__context, __obj, *args, **kwargs)
        for internal in ("_loop_vars", "_block_vars"):  # compiled templates add them to every call in a loop or block
            kwargs.pop(internal, None)
        if (twins := __self._twins) is not None and __obj.__name__ in _SEARCHES:
            args = tuple(_needle(twins, one, owner) for one in args)
        if __obj.__name__ == "replace":
            return __self._replace(owner, *args, **kwargs)
        if __obj.__name__ == "join":
            return __self._join(args[0], owner)
        __self.budget.spend(len(owner))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self.budget.spend(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str):
                self._check_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            if (left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()) > 4096:
                raise TemplateLimit("the chat template computes with numbers that are too large")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self.budget.spend(len(sequence) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's, which finds by an exception that ``message.role`` is an item."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, [args, kwargs])
            return formatter(*args, **kwargs)

        return checked

    # ------------------------------------------------------------------ pieces

    @property
    def _twins(self) -> Twins | None:
        found: Twins | None = self._thread.twins
        return found

    def _shown(self, value: Any) -> Any:
        """What is compared with a text of the template's."""
        twins = self._twins
        return value if twins is None or not isinstance(value, str) else twins.shown(value)

    def text_of(self, value: Any) -> str:
        """``str(value)``, paid for before it is built."""
        if isinstance(value, str):
            return value
        self._pay_for(value)
        return str(value)

    def _pay_for(self, value: Any) -> None:
        """A list that holds itself twice, and so on, is small in memory and endless when written: count as written."""
        items, characters, stack = 0, 0, [value]
        while stack:
            items += 1
            item = stack.pop()
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
            if items + len(stack) > MAX_ITEMS:
                raise TemplateLimit(f"the chat template writes a value of more than {MAX_ITEMS} items")
        self.budget.spend(characters + 8 * items)

    def _check_format(self, text: str, values: Any) -> None:
        if _WIDE_FORMAT.search(text):
            raise TemplateLimit("the chat template formats with a width that is not allowed")
        self.budget.spend(len(text))
        self._pay_for(values)

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter of Jinja's that pays for the length of its input."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            value = args[at]
            self.budget.spend(len(value) if isinstance(value, Sized) else 0)
            return function(*args, **kwargs)

        return metered

    def _counted(self, items: Any) -> Iterable[Any]:
        return _Rounds(items, self.budget)

    def _concat(self, parts: list[Any]) -> str:
        return self._join(parts)

    def _join(self, items: Any, d: str = "", attribute: str | int | None = None) -> str:
        texts = []
        for item in items:
            texts.append(self.text_of(item if attribute is None else self.getitem(item, attribute)))
            self.budget.spend(len(texts[-1]) + len(d))
        return str(d).join(texts)

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text, old, new = self.text_of(value), str(old), str(new)
        if (twins := self._twins) is not None:
            old = twins.needle(old, text)
        found = text.count(old) if old else len(text) + 1
        self.budget.spend(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text, pad = self.text_of(value), width if isinstance(width, str) else " " * min(width, 1000)
        lines = text.splitlines(keepends=True)
        self.budget.spend(len(text) + len(lines) * len(pad))
        return "".join(
            pad + line if (first or index) and (blank or line.strip()) else line for index, line in enumerate(lines)
        )

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As chat templates expect it: keys in their order, nothing escaped for HTML."""
        self._pay_for(value)
        indent = None if indent is None else max(0, min(int(indent), 16))
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        return text if not ensure_ascii or text.isascii() else _NO_ASCII.sub(self._escaped, text)

    def _escaped(self, match: re.Match[str]) -> str:
        """As JSON escapes it, if it is a character of the value's."""
        twins = self._twins
        if twins is not None and match[0] in twins.characters:
            return match[0]
        return json.dumps(match[0])[1:-1]


# Methods of texts that look for what they are given.
_SEARCHES = frozenset(
    {"count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex"}
    | {"rpartition", "rsplit", "rstrip", "split", "startswith", "strip"}
)


def _needle(twins: Twins, value: Any, place: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_needle(twins, one, place) for one in value)
    return twins.needle(value, place) if isinstance(value, str) else value


def _show_operands(comparison: nodes.Compare) -> None:
    """Only a text with other characters than letters can hold a twin: most comparisons are with a role's name."""
    constants = [one.value for one in comparison.find_all(nodes.Const)]
    if all(not isinstance(one, str) or one.isalnum() for one in constants):
        return
    operands: list[Any] = [comparison, *comparison.ops]
    for operand in operands:
        if not isinstance(operand.expr, nodes.Const):
            operand.expr = nodes.Filter(operand.expr, "_shown", [], [], None, None, lineno=comparison.lineno)


def _replace_children(parent: nodes.Node, kind: type[nodes.Node], replace: Callable[[Any], nodes.Node]) -> None:
    for field, value in parent.iter_fields():
        if isinstance(value, kind):
            setattr(parent, field, replace(value))
        elif isinstance(value, list):
            value[:] = [replace(item) if isinstance(item, kind) else item for item in value]


def _bounded_concat(concat: nodes.Concat) -> nodes.Node:
    parts = nodes.List(concat.nodes, lineno=concat.lineno)
    return nodes.Filter(parts, "_concat", [], [], None, None, lineno=concat.lineno)


@pass_context  # also keeps Jinja from calling it on constants at load time
def _finalize(context: Context, value: Any) -> str:
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    text = environment.text_of(value)
    environment.budget.spend(len(text))
    return text


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit(f"the chat template counts over {len(numbers)} numbers; the limit is {MAX_RANGE}")
    return numbers


def _raise_exception(message: Any) -> str:
    raise TemplateRaised(str(message)[:1000])


def _strftime_now(format: str) -> str:
    if len(format) > 64 or _WIDE_FORMAT.search(format) or re.search(r"%\d", format):
        raise TemplateLimit("the chat template formats the date with a width that is not allowed")
    return datetime.now().strftime(format)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not 0 <= precision <= 15:
        raise TemplateLimit(f"the chat template rounds to {precision} places; the limit is 15")
    return float(do_round(value, precision, method))  # type: ignore[arg-type]
