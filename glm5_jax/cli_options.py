"""Command-line options from dataclasses, through tyro, with every mistake as one line."""

import contextlib
import dataclasses
import difflib
import io
import re

import tyro

from glm5_jax.config import PRESETS
from glm5_jax.errors import UserError
from glm5_jax.importing import call_object


def parse(options, arguments: list[str], program: str, description: str):
    """`options` (a dataclass instance: the defaults) with command-line overrides applied.

    Raises:
      UserError: an unknown option, or a value that does not fit.
      SystemExit: status 0, after printing the help.
    """
    if not {"--help", "-h"} & set(arguments):
        _check_names(options, arguments)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(type(options), prog=program, description=description, default=options, args=arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(errors.getvalue())) from None


def _check_names(options, arguments: list[str]) -> None:
    known = set(_names(options, ""))
    for argument in arguments:
        if argument.startswith("--"):
            name = _name(argument)
            if name not in known and re.sub(r"(^|\.)no_", r"\1", name) not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean --{close[0].replace('_', '-')}?" if close else ""
                raise UserError(f"unknown setting {argument.split('=')[0]}{hint}")


def given(arguments: list[str]) -> set[str]:
    """The names of the settings that a command line sets, whatever it sets them to."""
    return {_name(argument) for argument in arguments if argument.startswith("--")}


def _name(argument: str) -> str:
    return argument[2:].split("=")[0].replace("-", "_")


def _names(options, prefix: str) -> list[str]:
    names = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            names += _names(value, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names


def _one_line(text: str) -> str:
    """The sentences in tyro's box, which it draws with lines or, where the terminal's encoding has none, with dashes."""
    lines = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]|-{4,}", "", text).splitlines()
    _title, *sentences = [line.strip() for line in lines if line.strip()]
    words = re.sub(r"^Error parsing (Options: )?", "", re.sub(r"\s+", " ", " ".join(sentences)))
    return re.split(r" For full helptext| Argument helptext", words)[0]


def find_config(name: str, recipes: dict, kind: type):
    """The config that a name on the command line stands for.

    Args:
      name: a recipe, `path/to/file.py` (its function config()), `file.py:function` or `module:function`.
      recipes: name -> function.
      kind: what the function must return.
    """
    if name in recipes:
        return recipes[name]()
    if not name.endswith(".py") and ":" not in name:
        known = ", ".join(recipes)
        models = f" ({name} is a model without a training recipe)" if name in PRESETS else ""
        raise UserError(f"unknown config {name!r}{models}: one of {known}, or a file like path/to/mine.py")
    config = call_object(name if ":" in name else f"{name}:config")
    if not isinstance(config, kind):
        raise UserError(f"{name}: returns {type(config).__name__}, not {kind.__name__}")
    return config
