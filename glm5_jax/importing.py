"""Objects named by a string: `package.module:Name` or `path/to/file.py:Name`, for config files and networks."""

import importlib
import importlib.util
import pathlib
import sys
import traceback
import zlib

from glm5_jax.config import check
from glm5_jax.errors import UserError


def import_object(name: str):
    """The object that `name` stands for.

    Raises:
      UserError: no such file, module or attribute, or the code fails to load.
    """
    where, _, attribute = name.rpartition(":")
    try:
        is_file = where.endswith(".py")
        check(not is_file or pathlib.Path(where).is_file(), f"{where}: no such file")
        module = _from_file(pathlib.Path(where)) if is_file else importlib.import_module(where)
        return getattr(module, attribute)
    except UserError:
        raise
    except Exception as error:  # the file is the user's: whatever goes wrong in it is theirs to read
        raise UserError(f"{where}{line_of(error, where)}: {type(error).__name__}: {error}") from None


def call_object(name: str, *arguments):
    """What the function that `name` stands for returns.

    Raises:
      UserError: as `import_object`, no function, or what it raises, in one line.
    """
    function = import_object(name)
    check(callable(function), f"{name}: is not a function")
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:  # the user's own code
        file = name.rpartition(":")[0]
        raise UserError(f"{file}{line_of(error, file)}: {type(error).__name__}: {error}") from None


def line_of(error: Exception, file: str) -> str:
    """", line N" of the innermost frame in `file`, "" if the error did not pass through it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(pathlib.Path(file).resolve())]
    return f", line {lines[-1]}" if lines else ""


def _from_file(path: pathlib.Path):
    """The module of a file; loaded once, so that classes compare equal between two imports."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    # A name of its own: a file called json.py must not become what `import json` gives.
    spec = importlib.util.spec_from_file_location(f"glm5_config_{path.stem}_{zlib.crc32(bytes(path))}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
