"""The chat template of GLM-5, 5.1 and 5.2: messages -> text, special tokens, and which of them the model sampled
(paper section 3.1).

    spans = render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids, trained = encode(spans, tokenizer)     # [gMASK]<sop><|user|>Hi<|assistant|><think>, none of it trained

Messages are those of the OpenAI API with `reasoning_content`. Rendered text equals the released templates' byte for byte,
but for what they get wrong: content null is empty (GLM-5's template prints "None"), and a tool result in parts is their text.

A turn has no end token: the model stops by sampling the token that opens the next one, <|user|> after an answer,
<|observation|> after tool calls, or <|endoftext|>. Sampled are the reasoning, the </think> that closes it, the answer, the
tool calls and the stop; <|assistant|> and the <think> behind it, or the whole block where thinking is off, are given.
"""

import itertools
import json
from typing import NamedTuple

import numpy as np

from glm5_jax.config import check
from glm5_jax.convert.tokenizer import CHAT_TOKENS

VERSIONS = ("5", "5.1", "5.2")
EFFORTS = ("high", "max")
ROLES = ("system", "user", "assistant", "tool")
HIDDEN_TOOL_KEYS = ("defer_loading", "strict")  # of the API, not shown to a model since 5.1


class Span(NamedTuple):
    """Piece of a rendered conversation. special: `text` names a special token, else it is text and spells none.

    trained: the model sampled it and learns it.
    """

    text: str
    special: bool
    trained: bool


class Example(NamedTuple):
    """What trains as one document. end: its end, <|endoftext|>, is the stop that the model samples."""

    spans: list[Span]
    end: bool


def render(
    messages: list[dict],
    tools: list[dict] | None = None,
    version: str = "5",
    thinking: bool = True,
    clear_thinking: bool = True,
    add_generation_prompt: bool = False,
    reasoning_effort: str = "max",
) -> list[Span]:
    """A conversation as a model of `version` sees it.

    Args:
      messages: dicts with role and content; of an assistant also reasoning_content, tool_calls, and loss: False = not trained.
      tools: their declarations. thinking: whether the request that ends here thinks.
      clear_thinking: reasoning before the last user message is dropped ("interleaved"); False keeps all ("preserved").
      reasoning_effort: max or high, said to 5.2 alone.
    Raises:
      UserError: what `check_messages` refuses.
    """
    check_messages(messages, tools)
    check(version in VERSIONS, f"version={version}: one of {', '.join(VERSIONS)}")
    check(reasoning_effort in EFFORTS, f"reasoning_effort={reasoning_effort}: one of {', '.join(EFFORTS)}")
    spans = [_special("[gMASK]"), _special("<sop>")]
    if version == "5.2" and thinking:
        spans += [_special("<|system|>"), _text(f"Reasoning Effort: {reasoning_effort.capitalize()}")]
    if tools:
        spans += _tool_list(tools, version)
    last_user = _last_user(messages)
    reasoned = _turns_with_reasoning(messages)
    for i, message in enumerate(messages):
        role, before = message["role"], messages[i - 1] if i else None
        if role == "assistant":
            think = _think_block(message, version, thinking, clear_thinking, i > last_user, i in reasoned)
            spans += [_special("<|assistant|>"), *think, *_answer(message)]
        elif role == "tool":
            stop = [] if before["role"] == "tool" else [_special("<|observation|>", is_stop(before, role))]
            body = [_special("<tool_response>"), _text(text_of(message)), _special("</tool_response>")]
            spans += [*stop, *body]
        else:
            spans += [_special(f"<|{role}|>", is_stop(before, role)), _text(text_of(message))]
    if add_generation_prompt:
        opened = [] if version != "5.2" and not thinking else [_special("<think>")]
        spans += [_special("<|assistant|>"), *opened, *([] if thinking else [_special("</think>")])]
    return [span for span in spans if span.text]


def _special(name: str, trained: bool = False) -> Span:
    return Span(name, True, trained)


def _text(text: str, trained: bool = False) -> Span:
    return Span(text, False, trained)


def _trained(message: dict) -> bool:
    return message["role"] == "assistant" and message.get("loss", True)


def is_stop(before: dict | None, role: str) -> bool:
    """Whether the token that opens a message of `role` is what the model sampled, and learns, to end message `before`."""
    return before is not None and _trained(before) and role == ("tool" if before.get("tool_calls") else "user")


def text_of(message: dict) -> str:
    """The content of a message: a string, null, or a list of text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def _reasoning_and_answer(message: dict) -> tuple[str | None, str]:
    """Reasoning, None where there is none, and answer of an assistant message; old data holds both in the content."""
    text, reasoning = text_of(message), message.get("reasoning_content")
    if reasoning is None and "</think>" in text:
        first, *_, text = text.split("</think>")
        reasoning = first.split("<think>")[-1]
    return reasoning, text.strip()


def _last_user(messages: list[dict]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _turns_with_reasoning(messages: list[dict]) -> set[int]:
    """The messages of turns in which some message has the field reasoning_content: 5.1 keeps empty blocks there."""
    turns = list(itertools.accumulate(int(message["role"] == "user") for message in messages))
    named = {t for t, m in zip(turns, messages, strict=True) if t and isinstance(m.get("reasoning_content"), str)}
    return {i for i, turn in enumerate(turns) if turn in named}


def _think_block(message: dict, version: str, thinking: bool, clear: bool, current: bool, reasoned: bool) -> list[Span]:
    """What stands between <|assistant|> and the answer.

    Args:
      current: no user message follows. reasoned: see `_turns_with_reasoning`.
    """
    reasoning, _ = _reasoning_and_answer(message)
    loss = _trained(message)
    given = [_special("<think>")]
    if reasoning and (current or not clear):
        shown = reasoning.strip() if version == "5" else reasoning
        return [*given, _text(shown, loss), _special("</think>", loss)]
    # An empty block stands for reasoning that is left out, or it is what the model sampled: it thought of nothing.
    closed = _special("</think>", loss and thinking and not reasoning)
    if version == "5.2":
        return [*given, closed]
    if version == "5.1" and ((current and thinking) or (not current and not clear and reasoned)):
        return [*given, closed]
    return [_special("</think>")]


def _answer(message: dict) -> list[Span]:
    loss = _trained(message)
    spans = [_text(_reasoning_and_answer(message)[1], loss)]
    for call in message.get("tool_calls") or []:
        call = call.get("function", call)
        spans += [_special("<tool_call>", loss), _text(call["name"], loss)]
        for key, value in _arguments(call).items():
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            spans += [_special("<arg_key>", loss), _text(key, loss), _special("</arg_key>", loss)]
            spans += [_special("<arg_value>", loss), _text(value, loss), _special("</arg_value>", loss)]
        spans.append(_special("</tool_call>", loss))
    return spans


def _arguments(call: dict) -> dict:
    """The arguments of a call: an object, or a string of JSON that holds one."""
    arguments = call.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _tool_list(tools: list[dict], version: str) -> list[Span]:
    """The system message that declares the tools, one JSON object a line, and shows how to call them."""
    lines = []
    for tool in tools:
        if version != "5":
            tool = tool.get("function", tool)
            if tool.get("defer_loading"):
                continue
            tool = {key: value for key, value in tool.items() if key not in HIDDEN_TOOL_KEYS}
        lines.append(json.dumps(tool, ensure_ascii=False) + "\n")
    about = (
        "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    )
    how = "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    call = [_special("<tool_call>"), _text("{function-name}")]
    for n in (1, 2):
        call += [_special("<arg_key>"), _text(f"{{arg-key-{n}}}"), _special("</arg_key>")]
        call += [_special("<arg_value>"), _text(f"{{arg-value-{n}}}"), _special("</arg_value>")]
    return [_special("<|system|>"), _text(about + "".join(lines) + how), *call, _text("..."), _special("</tool_call>")]


def check_messages(messages: list[dict], tools: list[dict] | None = None) -> None:
    """Raises UserError that names the first message which is none of a conversation."""
    check(isinstance(messages, list), "messages: not a list")
    for i, message in enumerate(messages):
        _check_message(message, messages[:i], f"messages[{i}]")
    check(tools is None or isinstance(tools, list), "tools: not a list")
    for i, tool in enumerate(tools or []):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        good = isinstance(inner, dict) and isinstance(inner.get("name"), str)
        check(good, f"tools[{i}]: not a declaration of a function with a name")


def _check_message(message: dict, before: list[dict], where: str) -> None:
    check(isinstance(message, dict), f"{where}: not an object")
    role = message.get("role")
    check(role in ROLES, f"{where}.role={role!r}: one of {', '.join(ROLES)}")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    text = all(isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str)) for part in parts)
    check(content is None or isinstance(content, str | list), f"{where}.content: neither text nor a list of parts")
    check(text, f"{where}.content: has a part that is not text")
    if role != "assistant":
        for name in ("tool_calls", "reasoning_content", "loss"):
            check(message.get(name) is None, f"{where}.{name}: only an assistant message has it, this is of role {role}")
    check(isinstance(message.get("loss", True), bool), f"{where}.loss={message.get('loss')!r}: true or false")
    check(isinstance(message.get("thinking", True), bool), f"{where}.thinking={message.get('thinking')!r}: true or false")
    check("thinking" not in message or role == "user", f"{where}.thinking: belongs to the user message that starts a turn")
    reasoning = message.get("reasoning_content")
    check(reasoning is None or isinstance(reasoning, str), f"{where}.reasoning_content: not text")
    _check_calls(message, where)
    if role == "tool":
        _check_result(message, before, where)


def _check_calls(message: dict, where: str) -> None:
    calls = message.get("tool_calls") or []
    check(isinstance(calls, list), f"{where}.tool_calls: not a list")
    for i, call in enumerate(calls):
        call = call.get("function", call) if isinstance(call, dict) else None
        good = isinstance(call, dict) and isinstance(call.get("name"), str)
        check(good, f"{where}.tool_calls[{i}]: not a call of a function with a name")
        try:
            good = isinstance(_arguments(call), dict)
        except ValueError:
            good = False
        check(good, f"{where}.tool_calls[{i}].arguments: neither an object nor a string of JSON that holds one")


def _check_result(message: dict, before: list[dict], where: str) -> None:
    results = list(itertools.takewhile(lambda m: m["role"] == "tool", reversed(before)))
    caller = before[-len(results) - 1] if len(results) < len(before) else {}
    calls = caller.get("tool_calls") or []
    check(bool(calls), f"{where}: a tool result without a call before it")
    check(len(results) < len(calls), f"{where}: a tool result too many, the message before made {len(calls)} calls")
    ids = [call.get("id") for call in calls]
    given = message.get("tool_call_id")
    known = given is None or None in ids or given in ids
    check(known, f"{where}.tool_call_id={given!r}: no such call, only {', '.join(map(str, ids))}")


def examples(
    messages: list[dict],
    tools: list[dict] | None = None,
    version: str = "5",
    thinking: bool = True,
    clear_thinking: bool = True,
    reasoning_effort: str = "max",
) -> list[Example]:
    """What trains a conversation: every sampled token once, in the context that it was sampled in.

    The next user message may change what stands before it: it drops reasoning, and it may switch thinking. Where it does, the
    turns so far are one example and the next is another, in whose context they are not trained again. Where it does not (all
    reasoning kept, or none there), the conversation is one example. A turn is a user message and what follows up to the next;
    a user message with a field `thinking` says it for its turn, `thinking` for the others. An example without a trained token
    is left out.

    Raises:
      UserError: what `check_messages` refuses, and reasoning in a turn that does not think.
    """
    check_messages(messages, tools)
    starts = [0, *(i for i in range(1, len(messages)) if messages[i]["role"] == "user")]
    found, first, known = [], 0, []
    for start, end in itertools.pairwise([*starts, len(messages)] if messages else []):
        on = messages[start].get("thinking", thinking)
        for i in range(start, end):
            silent = on or not (messages[i]["role"] == "assistant" and _reasoning_and_answer(messages[i])[0])
            check(silent, f"messages[{i}]: reasons in a turn that does not think")
        settings = (tools, version, on, clear_thinking, False, reasoning_effort)
        shown = [span[:2] for span in render(messages[:end], *settings)]
        if shown[: len(known)] == known:
            found = found[:-1]
        else:
            first = start
        known = shown
        spans = render([*map(_context, messages[:first]), *messages[first:end]], *settings)
        found.append(_ended(spans, messages[end - 1], end == len(messages)))
    return [example for example in found if example.end or any(span.trained for span in example.spans)]


def _context(message: dict) -> dict:
    return {**message, "loss": False} if message["role"] == "assistant" else message


def _ended(spans: list[Span], last: dict, over: bool) -> Example:
    """An example with the stop of its last message. over: the conversation ends here."""
    if not _trained(last):
        return Example(spans, False)
    if last.get("tool_calls"):
        return Example([*spans, _special("<|observation|>", True)], False)
    return Example(spans, True) if over else Example([*spans, _special("<|user|>", True)], False)


def check_chat_tokens(tokenizer, name: str) -> None:
    """Raises UserError unless the tokenizer, of setting `name`, has all special tokens of the template."""
    missing = [token for token in CHAT_TOKENS if token not in tokenizer.chat_ids]
    check(not missing, f"data.tokenizer={name}: lacks tokens of the chat template: {' '.join(missing)}")


def encode(spans: list[Span], tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 [n] and trained bool [n]. Neighbouring text is encoded as one piece."""
    ids, trained = [], []
    for (special, loss), group in itertools.groupby(spans, lambda span: span[1:]):
        texts = [span.text for span in group]
        new = [tokenizer.chat_ids[name] for name in texts] if special else tokenizer.encode_plain("".join(texts))
        ids.append(np.asarray(new, np.int32))
        trained.append(np.full(len(new), loss))
    return np.concatenate(ids), np.concatenate(trained)


def marked(ids: np.ndarray, trained: np.ndarray, tokenizer) -> str:
    """The text of ids [n] with each run of trained tokens in ⟦ ⟧."""
    runs = itertools.groupby(zip(ids.tolist(), trained.tolist(), strict=True), lambda pair: pair[1])
    texts = [(loss, tokenizer.decode([i for i, _ in run])) for loss, run in runs]
    return "".join(f"⟦{text}⟧" if loss else text for loss, text in texts)
