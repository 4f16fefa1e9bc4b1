"""Tokenizers: lossless on any text, special tokens only from the pipeline, byte counts, bad files."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from glm5_jax.convert import tokenizer as T
from glm5_jax.errors import UserError

TEXTS = [
    "def add(left, right):\n    return left + right\n",
    "The quick brown fox jumps over the lazy dog. xyxyxy \u00e9t\u00e9 \u4e2d\u6587\n",
] * 3


@pytest.fixture(scope="module")
def bpe():
    return T.train_bpe(TEXTS, 300)


@pytest.fixture(scope="module")
def both(bpe):
    return T.ByteTokenizer(), bpe


def byte_level(vocab=None, added=()):
    """A byte-level tokenizer without merges: ids 0..255 unless `vocab` says otherwise, then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab or {c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for content, special in added:
        tokenizer.add_tokens([tokenizers.AddedToken(content, special=special, normalized=False)])
    return tokenizer


def saved(tokenizer, path):
    tokenizer.save(str(path))
    return str(path)


def test_byte_ids_by_hand():
    ids = T.ByteTokenizer().encode("a\u00e9\x00")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0x61 + 1, 0xC3 + 1, 0xA9 + 1, 1]
    assert T.ByteTokenizer.eos_id == 0 and T.ByteTokenizer().vocab_size == 260


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_and_its_bytes_add_up(both, text):
    for tokenizer in both:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.eos_id not in ids


def test_names_of_special_tokens_in_text_are_text(both):
    text = "a<|endoftext|><|code_prefix|>b"
    for tokenizer in both:
        special = {tokenizer.eos_id, *tokenizer.fim_ids}
        (ids,) = tokenizer.encode_batch([text])
        assert not special & set(ids.tolist())
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[sorted(special)].tolist() == [0, 0, 0, 0]


def test_special_ids_decode_to_their_names(both):
    for tokenizer in both:
        ids = [*tokenizer.fim_ids, tokenizer.eos_id]
        assert tokenizer.decode(ids) == "<|code_prefix|><|code_suffix|><|code_middle|><|endoftext|>"


def test_half_a_character_decodes_to_the_replacement_character(both):
    for tokenizer in both:
        ids = tokenizer.encode("\U0001f600")  # four bytes that no merge joins
        assert len(ids) == 4
        assert set(tokenizer.decode(ids[:3])) == {"\ufffd"}


@pytest.mark.parametrize("ids", [[-1], [5, 10**6]])
def test_ids_outside_the_vocabulary_are_refused(both, ids):
    for tokenizer in both:
        last = tokenizer.vocab_size - 1
        with pytest.raises(UserError, match=rf"\[{ids[-1]}\] is outside the vocabulary 0\.\.{last}"):
            tokenizer.decode(ids)


def test_trained_vocabulary_by_hand():
    """Specials first, then the 256 bytes; the first merge is the most frequent pair, x y: 6 times in each text."""
    tokenizer = T.train_bpe(["xyxyxy xyxyxy"] * 5, 278)
    vocabulary = tokenizer._tokenizer.get_vocab()
    assert tokenizer.vocab_size == 278
    assert [vocabulary[name] for name in (T.END_OF_TEXT, *T.FIM_TOKENS)] == [0, 1, 2, 3]
    assert tokenizer.eos_id == 0 and tokenizer.fim_ids == (1, 2, 3)
    assert tokenizer.chat_ids == dict(zip(T.CHAT_TOKENS, range(4, 20), strict=True))
    assert vocabulary["xy"] == 276
    assert tokenizer.encode("xyz").tolist() == [276, vocabulary["z"]]
    assert tokenizer.token_bytes[276] == 2 and not tokenizer.token_bytes[4:20].any()


def test_training_is_deterministic(bpe):
    assert T.train_bpe(TEXTS, 300)._tokenizer.to_str() == bpe._tokenizer.to_str()
    assert T.train_bpe(TEXTS, 290).fingerprint != bpe.fingerprint


def test_training_refuses_a_size_the_text_cannot_reach():
    """Only two merges exist in "ab ab": a b, and the space with ab."""
    with pytest.raises(UserError, match="tokenizer=bpe:300: the training text yields only 278 tokens; at most bpe:278"):
        T.train_bpe(["ab ab"], 300)


def test_saved_tokenizer_gives_the_same_ids(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    again = T.load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert again.fingerprint == bpe.fingerprint
    assert again.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert T.trained_tokenizer("bpe:300", tmp_path / "tokenizer.json").vocab_size == 300
    with pytest.raises(UserError, match="tokenizer=bpe:301: .*holds a vocabulary of 300"):
        T.trained_tokenizer("bpe:301", tmp_path / "tokenizer.json")


def test_foreign_tokenizer_with_added_tokens(tmp_path):
    """Other FIM names; <think> is not special, so its text counts; the vocabulary ends at the largest id."""
    added = [("<|endoftext|>", True), ("<|fim_prefix|>", True), ("<|fim_suffix|>", True), ("<|fim_middle|>", True)]
    tokenizer = T.load_tokenizer(saved(byte_level(added=[*added, ("<think>", False)]), tmp_path / "t.json"))
    assert (tokenizer.eos_id, tokenizer.fim_ids, tokenizer.vocab_size) == (256, (257, 258, 259), 261)
    ids = tokenizer.encode("a<think>")
    assert ids[1:].tolist() == [260] and tokenizer.token_bytes[ids].tolist() == [1, 7]
    assert tokenizer.chat_ids == {"<think>": 260}


@settings(deadline=None)
@given(st.text("<think>ab|", max_size=40))
def test_plain_text_never_gives_an_added_token(text):
    """Also where the file does not mark it special; other text is encoded as always."""
    added = [("<|endoftext|>", True), ("<think>", False), ("<thi", False), ("ab", False)]
    tokenizer = T.BpeTokenizer(byte_level(added=added), "test")
    text = f"{text}<think>{text}"
    assert max(tokenizer.encode(text)) >= 257 > max(tokenizer.encode_plain(text))
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    plain = text.replace("<thi", "").replace("ab", "")
    assert tokenizer.encode_plain(plain).tolist() == T.BpeTokenizer(byte_level(added=added[:1]), "test").encode(plain).tolist()


def test_the_bytes_of_a_chat_are_those_of_text_and_its_tokens_follow_them():
    chat, text = T.load_tokenizer("bytes:chat"), T.load_tokenizer("bytes")
    assert chat.vocab_size == 276 and list(chat.chat_ids.values()) == list(range(260, 276)) and not text.chat_ids
    assert chat.encode("a<think>").tolist() == text.encode("a<think>").tolist() == chat.encode_plain("a<think>").tolist()
    assert chat.decode([260, 98, 266]) == "[gMASK]a<think>" and not chat.token_bytes[257:].any()
    assert chat.fingerprint != text.fingerprint


def test_vocabulary_with_holes_is_as_large_as_its_largest_id(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: 2 * i for i, c in enumerate(alphabet)}
    tokenizer = T.load_tokenizer(saved(byte_level(vocab | {"<|endoftext|>": 1000}), tmp_path / "t.json"))
    assert tokenizer.vocab_size == 1001 and tokenizer.token_bytes.shape == (1001,)
    assert tokenizer.fim_ids is None and tokenizer.eos_id == 1000 and tokenizer.token_bytes[1000] == 0
    assert tokenizer.encode("\u00e9").max() <= 510


def test_bad_tokenizer_files(tmp_path):
    corrupt = tmp_path / "corrupt.json"
    corrupt.write_text("{broken")
    lossy = byte_level(added=[("<|endoftext|>", True)])
    lossy.normalizer = normalizers.NFC()
    cases = {
        str(tmp_path / "missing.json"): "no such file",
        str(corrupt): "not a readable tokenizer.json",
        saved(byte_level(), tmp_path / "no_end.json"): "no end-of-document token",
        saved(lossy, tmp_path / "lossy.json"): "not byte-level",
        saved(byte_level(added=[("<|endoftext|>", False)]), tmp_path / "spelt.json"): "not marked special",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            T.load_tokenizer(path)
        assert path in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:275", "bpe:-300", "bpe:\u0663\u0660\u0660\u0660\u0660"])
def test_bad_bpe_sizes(name):
    with pytest.raises(UserError, match="VOCAB of at least 276"):
        T.bpe_size(name)


def test_bpe_json_names_its_special_tokens(bpe, tmp_path):
    """transformers finds the specials in the file: the added_tokens list, not only the vocabulary."""
    bpe.save(tmp_path / "tokenizer.json")
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in added][0] == (0, "<|endoftext|>", True)
    assert len(added) == 20 and all(token["special"] for token in added)


def test_a_tokenizer_of_few_characters():
    t = T.load_tokenizer("chars:01=\u00e9")
    assert (t.vocab_size, t.eos_id, t.fim_ids) == (5, 0, None)
    assert t.encode("1=0\u00e9").tolist() == [2, 3, 1, 4] and t.encode("").dtype == np.int32
    assert t.decode([4, 1, 0]) == "\u00e90<|endoftext|>"
    assert t.token_bytes.tolist() == [0, 1, 1, 1, 2]
    assert t.fingerprint != T.load_tokenizer("chars:01\u00e9=").fingerprint
    for text in ("2", "1=0 ", "<|endoftext|>"):
        with pytest.raises(UserError, match="has no"):
            t.encode(text)
    for name in ("chars:", "chars:11"):
        with pytest.raises(UserError, match="each once"):
            T.load_tokenizer(name)
    with pytest.raises(UserError, match="outside the vocabulary"):
        t.decode([5])
