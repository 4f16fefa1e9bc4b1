"""Where documents come from: folders and files of text or code, JSONL, Parquet and ArrayRecord shards.

The released model's corpus (paper sections 2.2 and 2.3) is not public; this reads whatever corpus a researcher has.
Every document gets an id, which names it in messages and decides whether it is held out: the file's path inside the
source behind the source's own name, and for shards ":LINE" (JSONL, from 1) or ":ROW" (Parquet, ArrayRecord, from 0).
"""

import dataclasses
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from glm5_jax.config import check
from glm5_jax.errors import UserError

STDLIB = "stdlib"
SHARD_ENDINGS = (".jsonl", ".parquet", ".array_record")
TEXT_ENDINGS = (
    ".txt", ".md", ".rst", ".tex", ".html", ".css", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs",
    ".java", ".kt", ".scala", ".swift", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".lua", ".jl", ".r",
    ".hs", ".ml", ".sh", ".sql", ".toml", ".yaml", ".yml",
)  # fmt: skip
RECORDS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a source: its document id, its path and what identifies its content without reading it."""

    id: str
    path: Path
    size: int
    mtime_ns: int


def parse_source(entry: str) -> tuple[str, float]:
    """Splits "PATH" or "PATH@WEIGHT" (weight 1.0 by default). UserError unless the weight is positive and finite."""
    path, at, tail = entry.rpartition("@")
    try:
        weight = float(tail) if at else None
    except ValueError:  # the @ belongs to the path
        weight = None
    if weight is None:
        path, weight = entry, 1.0
    check(path != "", f"sources={entry!r}: names no path")
    check(math.isfinite(weight) and weight > 0, f"sources={entry}: the weight must be a positive number")
    return path, weight


def list_files(source: str, endings: tuple[str, ...]) -> tuple[File, ...]:
    """The files of a source sorted by id.

    source: a folder, which gives its files with one of `endings` or a shard ending; a single file, which is read
    whatever its ending; or "stdlib", the Python files of the interpreter's standard library without installed packages.
    Raises UserError for a path that is missing or unreadable, and when no file matches.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source == STDLIB else Path(source).expanduser().resolve()
    check(os.path.exists(root), f"sources={source}: no such file or folder")
    if root.is_file():
        return (_file(root.name, root),)
    wanted = (".py",) if source == STDLIB else (*endings, *SHARD_ENDINGS)
    name = STDLIB if source == STDLIB else root.name
    files = [_file(f"{name}/{path.relative_to(root).as_posix()}", path) for path in _walk(root, wanted, source)]
    check(bool(files), f"sources={source}: no file in this folder ends in any of {' '.join(wanted)}")
    return tuple(sorted(files, key=lambda file: file.id))


def _walk(root: Path, wanted: tuple[str, ...], source: str) -> Iterator[Path]:
    def refuse(error: OSError):  # os.walk passes over unreadable folders in silence unless told otherwise
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        if source == STDLIB:
            subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages")]
        # A link to nothing holds no text; real trees have them.
        yield from (
            Path(folder, name) for name in names if name.lower().endswith(wanted) and os.path.exists(Path(folder, name))
        )


def _file(name: str, path: Path) -> File:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return File(name, path, stat.st_size, stat.st_mtime_ns)


def read_documents(file: File, text_field: str, skipped: Counter) -> Iterator[tuple[str, str]]:
    """(document id, text) of every document in `file`, in order.

    skipped: counts, under "not UTF-8" and "empty", the documents left out for that reason.
    Raises UserError, which names the file and the line or row, for what cannot be read or lacks `text_field`.
    """
    reader = READERS.get(file.path.suffix.lower(), _read_text)
    try:
        for suffix, raw in reader(file.path, text_field):
            text = _as_text(raw)
            if text:
                yield file.id + suffix, text
            else:
                skipped["not UTF-8" if text is None else "empty"] += 1
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def _as_text(raw: bytes | str | None) -> str | None:
    """The text, "" for a missing value, None where it is not valid UTF-8 (a str can hold unpaired surrogates)."""
    try:
        if isinstance(raw, bytes):
            return raw.decode()
        (raw or "").encode()
        return raw or ""
    except UnicodeError:
        return None


def _read_text(path: Path, text_field: str) -> Iterator[tuple[str, bytes]]:
    yield "", path.read_bytes()


def _field_of_json(raw: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    check(isinstance(record, dict) and text_field in record, f"{where}: has no field text_field={text_field!r}")
    text = record[text_field]
    check(isinstance(text, str), f"{where}: the field text_field={text_field!r} is not a string")
    return text


def _read_jsonl(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f":{number}", _field_of_json(line, text_field, f"{path} line {number}")


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[str, str | None]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs the package pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            check(text_field in names, f"{path}: has no column text_field={text_field!r}, only {', '.join(names)}")
            kind = file.schema_arrow.field(text_field).type
            check(
                pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind),
                f"{path}: the column text_field={text_field!r} holds {kind}, not strings",
            )
            batches = file.iter_batches(batch_size=RECORDS_AT_ONCE, columns=[text_field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            yield from ((f":{row}", text) for row, text in enumerate(texts))
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:200]})") from error


def _read_array_record(path: Path, text_field: str) -> Iterator[tuple[str, bytes | str]]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise UserError(f"{path}: reading ArrayRecord needs the package array-record") from error
    path.open("rb").close()  # the reader itself reports a missing or unreadable file as an empty one
    reader = ArrayRecordReader(str(path))
    try:
        check(reader.ok(), f"{path}: not a readable ArrayRecord file")
        for start in range(0, reader.num_records(), RECORDS_AT_ONCE):
            records = reader.read(start, min(start + RECORDS_AT_ONCE, reader.num_records()))
            for row, raw in enumerate(records, start=start):
                is_json = raw.startswith(b"{")
                yield f":{row}", _field_of_json(raw, text_field, f"{path} record {row}") if is_json else raw
    except RuntimeError as error:
        raise UserError(f"{path}: not a readable ArrayRecord file ({error})") from error
    finally:
        if reader.ok():  # closing a broken one raises
            reader.close()


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".array_record": _read_array_record}
