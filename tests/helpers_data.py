"""A small corpus of text files and how the tests load it."""

from glm5_jax.convert.tokenizer import ByteTokenizer
from glm5_jax.train import data as D

TEXTS = {f"file{i:02}.txt": f"document {i} \u00e9\n" + "lorem ipsum " * (i * i % 17) for i in range(40)}


def write_folder(path, texts=TEXTS):
    path.mkdir()
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")
    return str(path)


def config(*entries, **settings):
    return D.DataConfig(**dict(sources=entries, seq_len=64, held_out=0.2) | settings)


def load(tmp_path, *entries, **settings):
    c = config(*entries, **settings)
    return D.load_corpus(c, tmp_path / "cache"), c


def documents_of(source):
    """{id: text} of tokenised bytes."""
    return {name: ByteTokenizer().decode(source[d]) for d, name in enumerate(source.ids)}
