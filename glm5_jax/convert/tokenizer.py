"""Text to token ids and back: raw bytes, a Hugging Face `tokenizer.json`, or a byte-level BPE trained here.

Paper section 2.2: byte-level vocabulary, documents joined by `<|endoftext|>`, fill-in-the-middle markers on code. Both
tokenizers are byte-level, so any text comes back unchanged, and text that spells the name of a special token is encoded
as ordinary characters: only the pipeline itself can emit an end of document.

Both classes have the same members:
    vocab_size   W, one more than the largest id
    eos_id       id that ends a document; also fills padding
    fim_ids      (prefix, suffix, middle) ids or None
    chat_ids     dict of the CHAT_TOKENS it has, name -> id
    token_bytes  int32 [W], UTF-8 bytes of text that each id stands for; 0 for special tokens
    fingerprint  str that changes whenever the ids of some text could change
    encode(text) -> int32 [n];  encode_batch(texts) -> list of int32 [n];  decode(ids) -> str
    encode_plain(text) -> int32 [n], never an added token, not even one that the file calls ordinary
"""

import hashlib
import re
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from glm5_jax.config import check
from glm5_jax.errors import UserError

END_OF_TEXT = "<|endoftext|>"
FIM_TOKENS = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")  # the names in the released GLM tokenizer
CHAT_TOKENS = (  # of the chat template (convert/chat.py), by their names in the released GLM tokenizer
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>")
FIM_NAMES = (FIM_TOKENS, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
RESERVED = (END_OF_TEXT, *FIM_TOKENS, *CHAT_TOKENS)  # ids 0.. of a BPE trained here
SMALLEST_BPE = 256 + len(RESERVED)
# Code, accents composed and decomposed, white space, four-byte characters: what a lossy tokenizer changes.
PROBE = "def f(x):\n\treturn  x+1\r\n \u00e9 e\u0301 \ufb01 \u4e2d\u6587 \U0001f600 " + END_OF_TEXT + " \x00\x7f "


def _check_ids(ids, vocab_size: int) -> np.ndarray:
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    check(outside.size == 0, f"token ids: {outside[:1]} is outside the vocabulary 0..{vocab_size - 1}")
    return ids


class ByteTokenizer:
    """Id 0 ends a document, byte b is id b + 1, ids 257..259 are the FIM markers: 260 ids in all.

    With `chat` CHAT_TOKENS are ids 260..275.
    """

    eos_id = 0
    fim_ids = (257, 258, 259)

    def __init__(self, chat: bool = False):
        names = (END_OF_TEXT, *(bytes([b]) for b in range(256)), *FIM_TOKENS, *(CHAT_TOKENS if chat else ()))
        self.vocab_size = len(names)
        self.fingerprint = "bytes:chat" if chat else "bytes"
        self.chat_ids = {name: names.index(name) for name in CHAT_TOKENS} if chat else {}
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        self.token_bytes[1:257] = 1
        self._pieces = [name if isinstance(name, bytes) else name.encode() for name in names]

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], one id per UTF-8 byte of `text`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 1

    encode_plain = encode

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        """Text of `ids` [n]; special tokens by name, broken UTF-8 as U+FFFD. UserError for ids outside 0..W-1."""
        return b"".join(self._pieces[i] for i in _check_ids(ids, self.vocab_size)).decode(errors="replace")


class BpeTokenizer:
    """A byte-level tokenizer of the `tokenizers` library.

    Raises UserError, which names `source`, when it has no end-of-document token or does not return text unchanged.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: str):
        self.fingerprint = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        tokenizer.encode_special_tokens = True  # names of special tokens inside a text stay ordinary text
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # the ids of released tokenizers may have holes
        self.eos_id = next((vocabulary[name] for name in EOS_NAMES if name in vocabulary), -1)
        check(self.eos_id >= 0, f"tokenizer={source}: has no end-of-document token, any of {', '.join(EOS_NAMES)}")
        found = (names for names in FIM_NAMES if all(name in vocabulary for name in names))
        self.fim_ids = next((tuple(vocabulary[name] for name in names) for names in found), None)
        self.chat_ids = {name: vocabulary[name] for name in CHAT_TOKENS if name in vocabulary}
        ordinary = [t.content for t in tokenizer.get_added_tokens_decoder().values() if not t.special]
        inside = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in ordinary if len(name) > 1]
        self._inside = re.compile("|".join(inside)) if inside else None  # the place after the first character of each
        self.token_bytes = _token_bytes(tokenizer, vocabulary, self.vocab_size)
        self.token_bytes[self.eos_id] = 0
        ids = self.encode(PROBE)
        check(self.eos_id not in ids, f"tokenizer={source}: {END_OF_TEXT} is not marked special, text could spell it")
        lossless = self.decode(ids) == PROBE and self.token_bytes[ids].sum() == len(PROBE.encode())
        check(lossless, f"tokenizer={source}: is not byte-level, text does not come back unchanged from its ids")

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], the ids of `text` without any added begin or end."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_plain(self, text: str) -> np.ndarray:
        """Like `encode`, but added tokens that are not marked special cannot be spelled either: int32 [n].

        In released tokenizers <think> and <tool_response> are such tokens. Text that holds a name of one is cut inside it.
        """
        pieces = self._inside.split(text) if self._inside else [text]
        return np.concatenate([self.encode(piece) for piece in pieces])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids) -> str:
        """Text of `ids` [n]; special tokens by name, broken UTF-8 as U+FFFD. UserError for ids outside 0..W-1."""
        return self._tokenizer.decode(_check_ids(ids, self.vocab_size).tolist(), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`, readable by `load_tokenizer` and transformers."""
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
        self._tokenizer.save(str(partial))
        partial.replace(path)


class CharTokenizer:
    """Id 0 ends a document, the characters of an alphabet follow: for tasks whose texts use few of them, and small models.

    Raises UserError when the alphabet is empty or has a character twice, and for text outside of it.
    """

    eos_id = 0
    fim_ids = None

    def __init__(self, alphabet: str):
        once = bool(alphabet) and len(set(alphabet)) == len(alphabet)
        check(once, f"tokenizer=chars:{alphabet}: needs characters behind the colon, each once")
        self.fingerprint, self.vocab_size = f"chars:{alphabet}", len(alphabet) + 1
        self.chat_ids: dict[str, int] = {}
        self.token_bytes = np.array([0, *(len(c.encode()) for c in alphabet)], np.int32)
        self._pieces = [END_OF_TEXT, *alphabet]
        self._ids = {c: i for i, c in enumerate(alphabet, 1)}

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], one id per character of `text`."""
        foreign = sorted(set(text) - set(self._ids))
        check(not foreign, f"tokenizer={self.fingerprint}: has no {foreign[0] if foreign else ''!r}, which the text needs")
        return np.array([self._ids[c] for c in text], np.int32)

    encode_plain = encode

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        """Text of `ids` [n], the end by name. UserError for ids outside 0..W-1."""
        return "".join(self._pieces[i] for i in _check_ids(ids, self.vocab_size))


def _token_bytes(tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int], vocab_size: int) -> np.ndarray:
    """int32 [W]. In the vocabulary of a byte-level BPE each character of a token stands for one byte."""
    sizes = np.zeros(vocab_size, np.int32)
    for token, i in vocabulary.items():
        sizes[i] = len(token)
    for i, token in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = 0 if token.special else len(token.content.encode())
    return sizes


def bpe_size(name: str) -> int | None:
    """VOCAB of the setting "bpe:VOCAB", None for any other name. UserError if VOCAB is no number or too small."""
    if not name.startswith("bpe:"):
        return None
    size = int(name[4:]) if re.fullmatch("[0-9]{1,7}", name[4:]) else 0
    check(size >= SMALLEST_BPE, f"tokenizer={name}: bpe:VOCAB needs a VOCAB of at least {SMALLEST_BPE}")
    return size


def load_tokenizer(name: str) -> ByteTokenizer | CharTokenizer | BpeTokenizer:
    """The tokenizer "bytes", "bytes:chat", "chars:ALPHABET" or that of a `tokenizer.json` file.

    UserError for a missing, corrupt or lossy file.
    """
    if name in ("bytes", "bytes:chat"):
        return ByteTokenizer(chat=name == "bytes:chat")
    if name.startswith("chars:"):
        return CharTokenizer(name.removeprefix("chars:"))
    check(
        Path(name).is_file(),
        f"tokenizer={name}: no such file; allowed: bytes, bytes:chat, chars:ALPHABET, bpe:VOCAB, path of a tokenizer.json",
    )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(name)
    except Exception as error:  # the library raises bare Exception for a broken file
        raise UserError(f"tokenizer={name}: not a readable tokenizer.json ({_one_line(error)})") from error
    return BpeTokenizer(tokenizer, name)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """A byte-level BPE of exactly `vocab_size` ids trained on `texts`.

    Id 0 is `<|endoftext|>`, ids 1..3 are the FIM markers, 4..19 CHAT_TOKENS, then the 256 bytes, then the merges. The same
    texts in the same order give the same tokenizer. UserError when the texts are too few for that many merges.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(RESERVED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    check(
        reached == vocab_size,
        f"tokenizer=bpe:{vocab_size}: the training text yields only {reached} tokens; at most bpe:{reached}",
    )
    return BpeTokenizer(tokenizer, f"bpe:{vocab_size}")


def trained_tokenizer(name: str, path: Path) -> BpeTokenizer | None:
    """The BPE "bpe:VOCAB" trained earlier and kept at `path`, None if there is none. UserError if of another size."""
    if not path.exists():
        return None
    tokenizer = load_tokenizer(str(path))
    check(
        tokenizer.vocab_size == bpe_size(name),
        f"tokenizer={name}: {path} holds a vocabulary of {tokenizer.vocab_size}; use that size or another directory",
    )
    return tokenizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
