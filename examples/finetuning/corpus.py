"""Conversations to train on: the standard library's own functions, or a JSONL file of the user's.

A conversation is a list of `{"role": ..., "content": ...}`, roles system, user and assistant. The embedded data turn
every documented function of the standard library into one: its signature and docstring ask, its body answers.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Message: TypeAlias = dict[str, str]
Conversation: TypeAlias = list[Message]

ROLES = ("system", "user", "assistant")
EXPECTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
MIN_DOCSTRING_CHARS = 20
FORMAT_VERSION = 1  # part of the cache's name: raise it when the extraction changes
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "turtledemo"}


class DataError(ValueError):
    """The data can't be used; the text says where and what was expected."""


def stdlib_conversations(cache_dir: Path) -> list[Conversation]:
    """The documented functions of the running Python's standard library, from `cache_dir` where they are there already.

    Deterministic for one Python build: files in the order of their names, functions in the order of their lines,
    exact duplicates once.
    """
    cached = cache_dir / f"stdlib-{platform.python_version()}-v{FORMAT_VERSION}.jsonl"
    if not cached.exists():
        write_atomically(cached, "".join(json.dumps({"messages": c}) + "\n" for c in extract_stdlib()))
    return read_jsonl(cached)


def extract_stdlib(root: Path | None = None) -> Iterator[Conversation]:
    """Yields one conversation for each documented function below `root` (default: the standard library)."""
    root = root or Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
            for conversation in _functions_of(path):
                text = json.dumps(conversation)
                if text not in seen:
                    seen.add(text)
                    yield conversation


def _functions_of(path: Path) -> Iterator[Conversation]:
    try:
        source = path.read_text("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):  # templates and files in other encodings are no loss
        return
    lines = source.split("\n")  # as the parser counts them: splitlines would also split at form feeds
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in sorted(functions, key=lambda node: node.lineno):
        docstring = ast.get_docstring(function)
        if docstring and len(docstring) > MIN_DOCSTRING_CHARS and (body := _body(function, lines)):
            yield _conversation(function, docstring, body)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """The source behind the docstring; comments between docstring and code belong to it."""
    first = function.body[0].end_lineno or 0
    return textwrap.dedent("\n".join(lines[first : function.body[-1].end_lineno])).strip()


def _conversation(function: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str, body: str) -> Conversation:
    keyword = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    signature = f"{keyword} {function.name}({ast.unparse(function.args)}){returns}:"
    return [{"role": "user", "content": f"{signature}\n{docstring}"}, {"role": "assistant", "content": body}]


def read_jsonl(path: Path) -> list[Conversation]:
    """The conversations of a JSONL file; blank lines are skipped.

    Raises:
        DataError: the file can't be read, or a line is not a conversation; names the line and what was expected.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read as UTF-8 text: {error}") from error
    lines = text.split("\n")  # not splitlines: a JSON string may hold U+2028
    conversations = [_parse_line(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if len(conversations) < 2:
        raise DataError(
            f"{path}: {len(conversations)} conversations, but one to train on and one to hold out are needed"
        )
    return conversations


def _parse_line(line: str, where: str) -> Conversation:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}); expected {EXPECTED}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: no list under "messages"; expected {EXPECTED}')
    for i, message in enumerate(messages):
        _check_message(message, f"{where}, message {i}")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no assistant message, so there is nothing to learn; expected {EXPECTED}")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{where}: {type(message).__name__} where an object with role and content was expected")
    if message.get("role") not in ROLES:
        raise DataError(f"{where}: role {message.get('role')!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise DataError(f"{where}: content is {type(message.get('content')).__name__}; expected a string")


def split(
    conversations: list[Conversation], num_train: int, num_heldout: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Splits into (train, held-out), by the hash of the content alone: the same conversation always falls the same way.

    At most a tenth of the conversations (but at least one) is held out; at most `num_train` of the rest are trained on.
    """
    ordered = sorted(conversations, key=lambda c: hashlib.sha256(json.dumps(c).encode()).digest())
    cut = max(1, min(num_heldout, len(ordered) // 10))
    return ordered[cut : cut + num_train], ordered[:cut]


def fingerprint(conversations: list[Conversation]) -> str:
    """A short name of this content, for caches made from it."""
    return hashlib.sha256(json.dumps(conversations).encode()).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
