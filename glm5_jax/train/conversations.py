"""Conversations as training documents: JSONL in, tokens and which of them are trained out (paper section 3.1).

A line is one conversation, an object with

    messages          as of the OpenAI API: role, content; of an assistant also reasoning_content and tool_calls
    tools             declarations of functions, optional
    thinking          false = requested without thinking; a user message with this field says it for its own turn
    clear_thinking    false = all reasoning stays in context; optional, instead of the setting
    reasoning_effort  max or high, said to 5.2 alone; optional

An assistant message with "loss": false stays in context and is not trained. A line that is no conversation ends the run with
one line that names it; a conversation that has nothing to teach is skipped and counted.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from glm5_jax.config import check
from glm5_jax.convert import chat as template
from glm5_jax.errors import UserError
from glm5_jax.train.sources import STDLIB, File, list_files

ARITHMETIC = "arithmetic"  # a source without files: sums, explained or worked out with a tool
ARITHMETIC_SIZE = 2000
EXAMPLES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """How conversations are rendered."""

    version: Literal["5", "5.1", "5.2"] = "5"  # whose chat template
    clear_thinking: bool = True  # each user message drops the reasoning before it; false = reasoning is preserved

    def __post_init__(self):
        check(self.version in template.VERSIONS, f"chat.version={self.version}: one of {', '.join(template.VERSIONS)}")


class Encoded(NamedTuple):
    """Consecutive examples. ids, trained: lists of int32 [n] and bool [n]; ends, sizes: of each, bool and bytes of text."""

    names: list[str]
    ids: list[np.ndarray]
    trained: list[np.ndarray]
    ends: list[bool]
    sizes: list[int]


def list_conversations(source: str) -> tuple[File, ...]:
    """The JSONL files of a source: a folder, one file, or "arithmetic". UserError where there are none."""
    if source == ARITHMETIC:
        return (File(ARITHMETIC, Path(ARITHMETIC), ARITHMETIC_SIZE, 0),)
    check(source != STDLIB, f"sources={source}: holds no conversations; name a JSONL file, a folder of them, or {ARITHMETIC}")
    files = list_files(source, ())
    files = tuple(file for file in files if len(files) == 1 or file.path.suffix.lower() == ".jsonl")
    check(bool(files), f"sources={source}: no file in this folder ends in .jsonl")
    return files


def encoded_conversations(
    files: Sequence[File], config: ChatConfig, tokenizer, skipped: Counter, progress: Callable[[File], None]
) -> Iterator[Encoded]:
    """The examples of all conversations of `files`, never an empty batch of them. All of one conversation have its name.

    Raises UserError, which names file and line, for what is no conversation.
    """
    batch = Encoded([], [], [], [], [])
    for file in files:
        for name, found in _read(file, config, skipped):
            for example in found:
                ids, trained = template.encode(example.spans, tokenizer)
                size = sum(len(span.text.encode()) for span in example.spans if not span.special)
                for items, item in zip(batch, (name, ids, trained, example.end, size), strict=True):
                    items.append(item)
            if len(batch.names) >= EXAMPLES_AT_ONCE:
                yield batch
                batch = Encoded([], [], [], [], [])
        progress(file)
    if batch.names:
        yield batch


def _read(file: File, config: ChatConfig, skipped: Counter) -> Iterator[tuple[str, list[template.Example]]]:
    for number, record in _records(file):
        try:
            found, reason = _examples(record, config)
        except UserError as error:
            raise UserError(f"{file.path} line {number}: {error}") from None
        if reason:
            skipped[reason] += 1
        else:
            yield f"{file.id}:{number}", found


def _records(file: File) -> Iterator[tuple[int, dict]]:
    """(line number, record) of every line that is not blank."""
    if file.path == Path(ARITHMETIC):
        yield from enumerate(map(arithmetic, range(ARITHMETIC_SIZE)), start=1)
        return
    try:
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _record(line, f"{file.path} line {number}")
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def _record(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line)
        line.decode()
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    check(isinstance(record, dict) and "messages" in record, f"{where}: not an object with the field messages")
    return record


def _examples(record: dict, config: ChatConfig) -> tuple[list[template.Example], str]:
    """The examples of a conversation, or the reason why it has none."""
    messages, tools = record["messages"], record.get("tools")
    for name in ("thinking", "clear_thinking"):
        check(isinstance(record.get(name, True), bool), f"{name}={record.get(name)!r}: true or false")
    template.check_messages(messages, tools)
    if not messages:
        return [], "empty"
    if any(map(_says_nothing, messages)):
        return [], "with an empty answer"
    found = template.examples(
        messages, tools, config.version, record.get("thinking", True),
        record.get("clear_thinking", config.clear_thinking), record.get("reasoning_effort", "max"),
    )  # fmt: skip
    return found, "" if found else "with nothing to train"


def _says_nothing(message: dict) -> bool:
    said = template.text_of(message).strip() or message.get("tool_calls") or message.get("reasoning_content")
    return message["role"] == "assistant" and not said


def arithmetic(i: int) -> dict:
    """Conversation number i about a sum: two of three are thought through, the third uses a tool."""
    a, b = (int(n) for n in np.random.default_rng([i, 0]).integers(10, 100, 2))
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    answer = {"role": "assistant", "content": f"{a} + {b} = {a + b}."}
    if i % 3 < 2:
        ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
        thought = f"{a % 10} + {b % 10} = {ones}, {tens - b // 10 * 10} + {b // 10 * 10} = {tens}, {tens} + {ones} = {a + b}."
        return {"messages": [question, answer | {"reasoning_content": thought}]}
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": a, "b": b})}}
    asked = {"role": "assistant", "content": None, "reasoning_content": "The tool can add.", "tool_calls": [call]}
    result = {"role": "tool", "content": str(a + b)}
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}
    return {"messages": [question, asked, result, answer | {"reasoning_content": "It says so."}], "tools": [tool]}
