"""Objects named by a string: `package.module:Name` or `path/to/file.py:Name`, for config files and networks."""

import importlib
import importlib.util
import pathlib
import sys

from glm5_jax.errors import UserError


def import_object(name: str):
    """The object that `name` stands for.

    Raises:
      UserError: no such file, module or attribute, or the code fails to load.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = _from_file(pathlib.Path(where)) if where.endswith(".py") else importlib.import_module(where)
        return getattr(module, attribute)
    except (ImportError, AttributeError, OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name}: cannot be imported ({type(error).__name__}: {error})") from None


def _from_file(path: pathlib.Path):
    """The module of a file; loaded once, so that classes compare equal between two imports."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        raise ImportError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
