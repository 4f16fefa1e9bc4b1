"""The chat template against strings written by hand, and which of its tokens are trained, to the token.

In the expected strings ⟦ ⟧ enclose what the model sampled.
"""

import itertools
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from glm5_jax.convert import chat as C
from glm5_jax.convert.tokenizer import CHAT_TOKENS, END_OF_TEXT, BpeTokenizer, ByteTokenizer
from glm5_jax.errors import UserError

BYTES = ByteTokenizer(chat=True)


def system(text):
    return {"role": "system", "content": text}


def user(text, **more):
    return {"role": "user", "content": text} | more


def said(text, reasoning=None, *calls, **more):
    message = {"role": "assistant", "content": text} | more
    message |= {} if reasoning is None else {"reasoning_content": reasoning}
    return message | ({"tool_calls": list(calls)} if calls else {})


def call(name, arguments):
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, **more):
    return {"role": "tool", "content": text} | more


def marks(spans):
    """The text of spans, runs of trained ones in ⟦ ⟧."""
    runs = itertools.groupby(spans, lambda span: span.trained)
    texts = [(trained, "".join(span.text for span in run)) for trained, run in runs]
    return "".join(f"⟦{text}⟧" if trained else text for trained, text in texts)


def rendered(*messages, **settings):
    return marks(C.render(list(messages), **settings))


def taught(*messages, **settings):
    """The examples of a conversation, <|endoftext|> included."""
    ends = {True: "⟦<|endoftext|>⟧", False: "<|endoftext|>"}
    return [(marks(spans) + ends[end]).replace("⟧⟦", "") for spans, end in C.examples(list(messages), **settings)]


# Turns


@pytest.mark.parametrize(
    "version, expected",
    [
        ("5", "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|></think>⟦Hello⟧"),
        ("5.1", "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think>⟦</think>Hello⟧"),
        (
            "5.2",
            "[gMASK]<sop><|system|>Reasoning Effort: Max<|system|>Be brief.<|user|>Hi<|assistant|><think>⟦</think>Hello⟧",
        ),
    ],
)
def test_system_user_assistant(version, expected):
    assert rendered(system("Be brief."), user("Hi"), said(" Hello\n"), version=version) == expected


def test_reasoning_is_sampled_and_the_token_that_opens_it_is_not():
    turn = user("Hi"), said("Hello", " Greet. ")
    assert rendered(*turn) == "[gMASK]<sop><|user|>Hi<|assistant|><think>⟦Greet.</think>Hello⟧"
    head = "[gMASK]<sop><|user|>Hi<|assistant|><think>"
    assert rendered(*turn, version="5.1") == head + "⟦ Greet. </think>Hello⟧"
    effort = "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>Hi<|assistant|><think>"
    assert rendered(*turn, version="5.2", reasoning_effort="high") == effort + "⟦ Greet. </think>Hello⟧"
    embedded = said("<think>Greet.</think>\n\nHello")
    assert rendered(turn[0], embedded) == head + "⟦Greet.</think>Hello⟧"


@pytest.mark.parametrize(
    "version, thinking, expected",
    [
        ("5", True, "<|user|>Hi<|assistant|><think>"),
        ("5", False, "<|user|>Hi<|assistant|></think>"),
        ("5.1", True, "<|user|>Hi<|assistant|><think>"),
        ("5.1", False, "<|user|>Hi<|assistant|></think>"),
        ("5.2", True, "<|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"),
        ("5.2", False, "<|user|>Hi<|assistant|><think></think>"),
    ],
)
def test_generation_prompt(version, thinking, expected):
    found = rendered(user("Hi"), version=version, thinking=thinking, add_generation_prompt=True)
    assert found == "[gMASK]<sop>" + expected
    answered = C.render([user("Hi"), said("Yes")], version=version, thinking=thinking)
    prompt = C.render([user("Hi")], version=version, thinking=thinking, add_generation_prompt=True)
    if (version, thinking) != ("5", True):  # GLM-5 writes a turn without reasoning as one that did not think
        assert answered[: len(prompt)] == prompt and all(span.trained for span in answered[len(prompt) :])


@pytest.mark.parametrize(
    "version, clear, first, second",
    [
        ("5", True, "</think>⟦A⟧", "</think>⟦B⟧"),
        ("5", False, "<think>⟦one</think>A⟧", "</think>⟦B⟧"),
        ("5.1", True, "</think>⟦A⟧", "</think>⟦B⟧"),
        ("5.1", False, "<think>⟦one</think>A⟧", "</think>⟦B⟧"),
        ("5.2", True, "<think></think>⟦A⟧", "<think>⟦</think>B⟧"),
        ("5.2", False, "<think>⟦one</think>A⟧", "<think>⟦</think>B⟧"),
    ],
)
def test_reasoning_before_the_last_user_message(version, clear, first, second):
    messages = user("1"), said("A", "one"), user("2"), said("B"), user("3"), said("C", "three")
    head = "[gMASK]<sop>" + ("<|system|>Reasoning Effort: Max" if version == "5.2" else "")
    expected = f"{head}<|user|>1<|assistant|>{first}⟦<|user|>⟧2<|assistant|>{second}⟦<|user|>⟧3"
    expected = f"{expected}<|assistant|><think>⟦three</think>C⟧".replace("⟧⟦", "")
    assert rendered(*messages, version=version, clear_thinking=clear) == expected


def test_an_empty_block_stays_in_a_turn_of_5_1_that_names_its_reasoning():
    messages = user("1"), said("A", "one", call("f", {})), result("r"), said("B"), user("2"), said("C")
    found = rendered(*messages, version="5.1", clear_thinking=False)
    assert "<think>⟦one</think>A<tool_call>f</tool_call><|observation|>⟧<tool_response>r</tool_response>" in found
    assert "</tool_response><|assistant|><think>⟦</think>B<|user|>⟧2<|assistant|><think>⟦</think>C⟧" in found


def test_thinking_off_trains_the_answer_alone():
    turn = user("Hi"), said("Hello")
    assert rendered(*turn, thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|></think>⟦Hello⟧"
    assert rendered(*turn, version="5.1", thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|></think>⟦Hello⟧"
    assert rendered(*turn, version="5.2", thinking=False) == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>⟦Hello⟧"


def test_content_may_be_null_or_parts():
    parts = [{"type": "text", "text": "a"}, "b"]
    expected = "[gMASK]<sop><|user|>ab<|assistant|></think>⟦<tool_call>f</tool_call><|observation|>⟧"
    found = rendered(user(parts), said(None, None, call("f", "{}")), result(parts))
    assert found == expected + "<tool_response>ab</tool_response>"


# Tools

TOOL = {"type": "function", "function": {"name": "é", "strict": True, "parameters": {"a": [1, "b"]}}}
LATER = {"type": "function", "function": {"name": "later", "defer_loading": True}}
HOW = """</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""
ABOUT = """[gMASK]<sop>EFFORT<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""


def test_declarations_of_tools():
    whole = (
        '{"type": "function", "function": {"name": "é", "strict": true, "parameters": {"a": [1, "b"]}}}\n'
        '{"type": "function", "function": {"name": "later", "defer_loading": true}}\n'
    )
    inner = '{"name": "é", "parameters": {"a": [1, "b"]}}\n'
    for version, effort, lines in (
        ("5", "", whole),
        ("5.1", "", inner),
        ("5.2", "<|system|>Reasoning Effort: Max", inner),
    ):
        found = rendered(user("Hi"), tools=[TOOL, LATER], version=version)
        assert found == ABOUT.replace("EFFORT", effort) + lines + HOW + "<|user|>Hi"
    assert rendered(user("Hi"), tools=[]) == "[gMASK]<sop><|user|>Hi"


def test_names_of_special_tokens_are_tokens_in_the_declaration_and_text_in_a_tool():
    tool = {"name": "f", "description": "<tool_call> and <|user|>"}
    ids, _ = C.encode(C.render([user("Hi")], tools=[tool]), BYTES)
    count = {name: ids.tolist().count(i) for name, i in BYTES.chat_ids.items()}
    assert count["<tool_call>"] == count["</tool_call>"] == count["<|user|>"] == 1
    assert count["<arg_key>"] == count["</arg_value>"] == 2


def test_calls_take_text_as_it_is_and_json_without_escapes():
    arguments = {"s": ' "é"\n', "n": 10, "list": [], "none": None, "digits": "001", "o": {"k": "é"}}
    expected = (
        '<tool_call>f<arg_key>s</arg_key><arg_value> "é"\n</arg_value><arg_key>n</arg_key><arg_value>10</arg_value>'
        "<arg_key>list</arg_key><arg_value>[]</arg_value><arg_key>none</arg_key><arg_value>null</arg_value>"
        '<arg_key>digits</arg_key><arg_value>001</arg_value><arg_key>o</arg_key><arg_value>{"k": "é"}</arg_value></tool_call>'
    )
    for form in (arguments, json.dumps(arguments)):
        assert rendered(user("x"), said("Look.", None, call("f", form))).endswith(f"</think>⟦Look.{expected}⟧")
    bare = {"name": "f", "arguments": arguments}
    assert rendered(user("x"), said("", None, bare)).endswith(f"</think>⟦{expected}⟧")


def test_a_run_of_results_has_one_observation_which_the_model_sampled():
    calls = call("f", {}), call("g", {"a": "b"})
    messages = user("x"), said("", "look", *calls), result(" r1"), result("r2"), said("done", "good")
    assert rendered(*messages) == (
        "[gMASK]<sop><|user|>x<|assistant|><think>⟦look</think><tool_call>f</tool_call>"
        "<tool_call>g<arg_key>a</arg_key><arg_value>b</arg_value></tool_call><|observation|>⟧<tool_response> r1</tool_response>"
        "<tool_response>r2</tool_response><|assistant|><think>⟦good</think>done⟧"
    )


def test_a_role_that_no_model_samples_is_not_trained():
    """After an answer only <|user|>, after calls only <|observation|>."""
    assert rendered(user("x"), said("A"), system("s")).endswith("⟦A⟧<|system|>s")
    assert rendered(user("x"), said("A", None, call("f", {})), user("y")).endswith("</tool_call>⟧<|user|>y")
    assert rendered(user("x"), user("y")).endswith("<|user|>x<|user|>y")


# What trains


def test_a_conversation_ends_in_the_stop_that_the_model_samples():
    assert taught(user("x"), said("A", "a")) == ["[gMASK]<sop><|user|>x<|assistant|><think>⟦a</think>A<|endoftext|>⟧"]
    waits = taught(user("x"), said("", "a", call("f", {})))
    head = "[gMASK]<sop><|user|>x<|assistant|><think>"
    assert waits == [head + "⟦a</think><tool_call>f</tool_call><|observation|>⟧<|endoftext|>"]
    assert taught(user("x"), said("A", "a"), system("late"))[0].endswith("<|system|>late<|endoftext|>")


def test_interleaved_thinking_teaches_each_turn_with_its_reasoning_and_once():
    tool = said("", "look", call("f", {})), result("r")
    turns = user("1"), *tool, said("A", "see"), user("2"), said("B", "two"), user("3"), said("C", "three")
    first, second, third = taught(*turns)
    seen = "<tool_call>f</tool_call>"
    assert first == (
        f"[gMASK]<sop><|user|>1<|assistant|><think>⟦look</think>{seen}<|observation|>⟧<tool_response>r</tool_response>"
        "<|assistant|><think>⟦see</think>A<|user|>⟧<|endoftext|>"
    )
    head = f"[gMASK]<sop><|user|>1<|assistant|></think>{seen}<|observation|><tool_response>r</tool_response>"
    head += "<|assistant|></think>A<|user|>2<|assistant|>"
    assert second == head + "<think>⟦two</think>B<|user|>⟧<|endoftext|>"
    assert third == head + "</think>B<|user|>3<|assistant|><think>⟦three</think>C<|endoftext|>⟧"


@pytest.mark.parametrize("version, empty", [("5", "</think>⟦"), ("5.2", "<think>⟦</think>")])
def test_turns_that_change_nothing_before_them_share_an_example(version, empty):
    """Preserved reasoning, or none."""
    effort = "<|system|>Reasoning Effort: Max" if version == "5.2" else ""
    kept = taught(user("1"), said("A", "one"), user("2"), said("B", "two"), version=version, clear_thinking=False)
    turns = "<|user|>1<|assistant|><think>⟦one</think>A<|user|>⟧2<|assistant|><think>⟦two</think>B<|endoftext|>⟧"
    assert kept == [f"[gMASK]<sop>{effort}{turns}"]
    none = taught(user("1"), said("A"), user("2"), said("B"), version=version)
    turns = f"<|user|>1<|assistant|>{empty}A<|user|>⟧2<|assistant|>{empty}B<|endoftext|>⟧"
    assert none == [f"[gMASK]<sop>{effort}{turns}"]


def test_turn_level_thinking():
    """5.2 says in its first line whether the request thinks, so each switch starts an example; GLM-5 does not."""
    messages = user("1"), said("A", "one"), user("2", thinking=False), said("B"), user("3", thinking=True), said("C", "three")
    on, off, again = taught(*messages, version="5.2", clear_thinking=False)
    effort = "<|system|>Reasoning Effort: Max"
    assert on == f"[gMASK]<sop>{effort}<|user|>1<|assistant|><think>⟦one</think>A<|user|>⟧<|endoftext|>"
    middle = "<|user|>1<|assistant|><think>one</think>A<|user|>2<|assistant|><think></think>"
    assert off == f"[gMASK]<sop>{middle}⟦B<|user|>⟧<|endoftext|>"
    assert again == f"[gMASK]<sop>{effort}{middle}B<|user|>3<|assistant|><think>⟦three</think>C<|endoftext|>⟧"
    (one,) = taught(*messages, version="5", clear_thinking=False)
    assert "A<|user|>⟧2<|assistant|></think>⟦B<|user|>⟧3<|assistant|><think>⟦three" in one
    (silent,) = taught(user("1"), said("A"), version="5.2", thinking=False)
    assert silent == "[gMASK]<sop><|user|>1<|assistant|><think></think>⟦A<|endoftext|>⟧"


def test_a_wrong_message_stays_in_context_and_is_not_trained_nor_its_stop():
    wrong = said("", "guess", call("f", {}), loss=False)
    (found,) = taught(user("x"), wrong, result("error"), said("A", "right"))
    assert found == (
        "[gMASK]<sop><|user|>x<|assistant|><think>guess</think><tool_call>f</tool_call><|observation|>"
        "<tool_response>error</tool_response><|assistant|><think>⟦right</think>A<|endoftext|>⟧"
    )
    assert taught(user("x"), said("A", loss=False)) == []
    assert [text[-40:] for text in taught(user("1"), said("A"), user("2"), said("B", loss=False))] == [
        "<|user|>⟧2<|assistant|></think>B<|endoftext|>"[-40:]
    ]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(C.VERSIONS),
    st.booleans(),
)
def test_every_sampled_token_is_trained_once_behind_the_prompt_it_was_sampled_from(turns, version, clear):
    """Each run of trained spans follows exactly the generation prompt of the messages before it; no answer is missing."""
    messages = []
    for i, (reasons, calls, thinks) in enumerate(turns):
        think = f"think {i}" if thinks and reasons else None
        messages.append(user(f"question {i}", thinking=thinks))
        messages += [said("", think, call(f"f{i}", {})), result(f"result {i}")] if calls else []
        messages.append(said(f"answer {i}", think))
    answers, prompts = [i for i, message in enumerate(messages) if message["role"] == "assistant"], {}
    for i in answers:
        asked = [m["thinking"] for m in messages[:i] if m["role"] == "user"][-1]
        # GLM-5 writes an answer without reasoning as one of a request that does not think.
        on = "reasoning_content" in messages[i] if version == "5" else asked
        prompt = C.render(messages[:i], version=version, thinking=on, clear_thinking=clear, add_generation_prompt=True)
        prompts[tuple(span[:2] for span in prompt)] = i
    answered = []
    for spans, _ in C.examples(messages, version=version, clear_thinking=clear):
        starts = [i for i in range(1, len(spans)) if spans[i].trained and not spans[i - 1].trained]
        answered += [prompts[tuple(span[:2] for span in spans[:at])] for at in starts]
    assert sorted(answered) == answers


# Tokens


def test_masks_are_exact_to_the_token():
    """Ids and masks by hand: bytes are b + 1, special tokens follow at 260 in the order of CHAT_TOKENS."""
    ids, trained = C.encode(C.render([user("é"), said("A", "b", call("f", {"k": 1})), result("r"), said("", "c")]), BYTES)
    text = lambda s: [b + 1 for b in s.encode()]  # noqa: E731
    token = {name: [260 + i] for i, name in enumerate(CHAT_TOKENS)}
    given, sampled = False, True
    expected = [
        (given, token["[gMASK]"] + token["<sop>"] + token["<|user|>"] + text("é") + token["<|assistant|>"] + token["<think>"]),
        (sampled, text("b") + token["</think>"] + text("A") + token["<tool_call>"] + text("f")),
        (sampled, token["<arg_key>"] + text("k") + token["</arg_key>"] + token["<arg_value>"] + text("1")),
        (sampled, token["</arg_value>"] + token["</tool_call>"] + token["<|observation|>"]),
        (given, token["<tool_response>"] + text("r") + token["</tool_response>"] + token["<|assistant|>"] + token["<think>"]),
        (sampled, text("c") + token["</think>"]),
    ]
    assert ids.dtype == np.int32 and trained.dtype == bool
    assert ids.tolist() == [i for _, part in expected for i in part]
    assert trained.tolist() == [loss for loss, part in expected for _ in part]


def released_like(ordinary=("<think>", "</think>", "<tool_response>", "</tool_response>")):
    """A byte-level tokenizer with merges over pieces of text, some of whose chat tokens are not marked special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "ab", "abc"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (END_OF_TEXT, *CHAT_TOKENS)
    tokenizer.add_tokens([tokenizers.AddedToken(n, special=n not in ordinary, normalized=False) for n in names])
    return BpeTokenizer(tokenizer, "test")


def test_untrusted_text_cannot_spell_a_token():
    evil = "".join(CHAT_TOKENS) + END_OF_TEXT
    messages = [system(evil), user(evil), said("", evil.replace("</think>", ""), call(evil, {evil: evil})), result(evil)]
    plain = [system("s"), user("u"), said("", "r", call("n", {"k": "v"})), result("t")]
    for tokenizer in (BYTES, released_like()):
        special = {*tokenizer.chat_ids.values(), tokenizer.eos_id}
        ids, trained = C.encode(C.render(messages), tokenizer)
        short, mask = C.encode(C.render(plain), tokenizer)
        where, wanted = np.isin(ids, list(special)), np.isin(short, list(special))
        assert ids[where].tolist() == short[wanted].tolist()
        assert trained[where].tolist() == mask[wanted].tolist()
        assert tokenizer.decode(ids) == "".join(span.text for span in C.render(messages))


def test_neighbouring_text_is_one_piece():
    spans = [C.Span("<|user|>", True, False), C.Span("xab", False, False), C.Span("c", False, False)]
    tokenizer = released_like()
    ids, _ = C.encode(spans, tokenizer)
    assert ids.tolist() == [tokenizer.chat_ids["<|user|>"], *tokenizer.encode("xabc")]
    assert len(ids) == 3


def test_a_tokenizer_without_the_tokens_is_refused_by_their_names():
    with pytest.raises(UserError, match=r"^data\.tokenizer=bytes: lacks tokens of the chat template: \[gMASK\] <sop> .*"):
        C.check_chat_tokens(ByteTokenizer(), "bytes")
    C.check_chat_tokens(BYTES, "bytes:chat")


def test_marked_text():
    ids, trained = C.encode(C.render([user("a"), said("é", "b")]), BYTES)
    assert C.marked(ids, trained, BYTES) == "[gMASK]<sop><|user|>a<|assistant|><think>⟦b</think>é⟧"


# What is no conversation

CALLED = [user("x"), said("", None, call("f", {}))]


@pytest.mark.parametrize(
    "messages, message",
    [
        ("text", r"messages: not a list"),
        (["text"], r"messages\[0\]: not an object"),
        ([user("x"), {"role": "bot", "content": "y"}], r"messages\[1\]\.role='bot': one of system, user, assistant, tool"),
        ([{"content": "y"}], r"messages\[0\]\.role=None: one of .*"),
        ([user(3)], r"messages\[0\]\.content: neither text nor a list of parts"),
        ([user([{"type": "image_url", "image_url": "x"}])], r"messages\[0\]\.content: has a part that is not text"),
        ([user("x"), result("r")], r"messages\[1\]: a tool result without a call before it"),
        ([result("r")], r"messages\[0\]: a tool result without a call before it"),
        ([*CALLED, result("r"), result("s")], r"messages\[3\]: a tool result too many, the message before made 1 calls"),
        ([*CALLED, result("r", tool_call_id="g")], r"messages\[2\]\.tool_call_id='g': no such call, only call-f"),
        ([*CALLED, user("y"), result("r")], r"messages\[3\]: a tool result without a call before it"),
        ([said("", None, call("f", "{"))], r"messages\[0\]\.tool_calls\[0\]\.arguments: neither an object nor .*"),
        ([said("", None, call("f", "[1]"))], r"messages\[0\]\.tool_calls\[0\]\.arguments: neither an object nor .*"),
        ([said("", None, {"function": {}})], r"messages\[0\]\.tool_calls\[0\]: not a call of a function with a name"),
        ([said("x", loss="no")], r"messages\[0\]\.loss='no': true or false"),
        ([user("x", loss=True)], r"messages\[0\]\.loss: only an assistant message has it, this is of role user"),
        ([user("x", reasoning_content="y")], r"messages\[0\]\.reasoning_content: only an assistant message .*"),
        ([said("x", thinking=False)], r"messages\[0\]\.thinking: belongs to the user message that starts a turn"),
        ([said("x", 3)], r"messages\[0\]\.reasoning_content: not text"),
        ([user("x", thinking=False), said("A", "a")], r"messages\[1\]: reasons in a turn that does not think"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named(messages, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        C.examples(messages)


def test_wrong_tools_and_settings_are_named():
    for tools, message in (("f", "tools: not a list"), ([{}], r"tools\[0\]: not a declaration .*"), ([3], r"tools\[0\]: .*")):
        with pytest.raises(UserError, match=f"^{message}$"):
            C.render([user("x")], tools=tools)
    with pytest.raises(UserError, match=r"^version=5\.3: one of 5, 5\.1, 5\.2$"):
        C.render([user("x")], version="5.3")
    with pytest.raises(UserError, match="^reasoning_effort=low: one of high, max$"):
        C.render([user("x")], version="5.2", reasoning_effort="low")
