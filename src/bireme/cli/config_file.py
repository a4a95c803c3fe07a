"""``--config FILE``: a command's options from YAML, by their long names. What the command line says itself, wins."""

from __future__ import annotations

import difflib
import types
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from bireme.cli.presentation import UsageError

_NAMES_OF_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class ConfigurableCommand(TyperCommand):
    """A command with a ``--config`` option. What the file says is checked like flags, after its own types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the file's options in front of those of the command line, except for those that it gives itself."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        path = given.get("config")
        if path is None:
            return super().parse_args(ctx, args)
        tokens = []
        for param, values in read_config(Path(path), self).items():
            if given.get(param.name) in (None, ()):
                tokens += _tokens_of(param, values)
        try:
            return super().parse_args(ctx, [*tokens, *args])
        except UsageError as error:
            if tokens:
                error.message += f" (with the options of {path})"  # type: ignore[attr-defined]
            raise


def read_config(path: Path, command: TyperCommand) -> dict[Any, list[Any]]:
    """The parameters of ``command`` that a file sets, each with its values (one, unless the option can be repeated).

    Raises:
        UsageError: the file cannot be read, or holds an unknown name or a value of another type.
    """
    known: dict[str, Any] = {}
    for each in command.params:
        if each.param_type_name == "argument":
            known[str(each.name)] = each
        else:
            known |= {name[2:]: each for name in each.opts if name.startswith("--") and name != "--config"}
    hints = get_type_hints(command.callback)
    found: dict[Any, list[Any]] = {}
    for key, value in _mapping_of(path).items():
        name = key.replace("_", "-") if isinstance(key, str) else repr(key)
        param: Any = known.get(name)
        if param is None:
            close = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise UsageError(f"{path}: {name} is no option of this command{hint}")
        if param in found:
            raise UsageError(f"{path}: {name} is set twice, by two of its names")
        if value is not None:
            found[param] = _values_of(path, name, value, hints[param.name])
    return found


def _mapping_of(path: Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """A key that comes twice is an error."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise UsageError(f"{path}: {key} is set twice")
        return dict(zip(keys, [loader.construct_object(value, deep=True) for _, value in node.value], strict=True))

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} (--config): {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} (--config) is no valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} (--config) must hold options, as in port: 8000")
    return content


def _values_of(path: Path, name: str, value: Any, hint: Any) -> list[Any]:
    kind, is_list = _kind_of(hint)
    values = value if is_list and isinstance(value, list) else [value]
    allowed = (int, float) if kind is float else (kind,)
    for each in values:
        if not isinstance(each, allowed) or (isinstance(each, bool) and kind is not bool):
            wanted = _NAMES_OF_TYPES[kind] + (", or a list of such" if is_list else "")
            quote = ": put it in quotes" if kind is str and not isinstance(each, (list, dict)) else ""
            raise UsageError(f"{path}: {name} is {each!r}: it must be {wanted}{quote}")
    return values


def _kind_of(hint: Any) -> tuple[type, bool]:
    """The type that YAML has for a parameter, and whether the parameter takes several values."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is list:
        return _kind_of(get_args(hint)[0])[0], True
    return (str if issubclass(hint, (Enum, Path)) else hint), False


def _tokens_of(param: Any, values: list[Any]) -> list[str]:
    if param.param_type_name == "argument":
        return [str(values[0])]
    name = param.opts[0]
    if isinstance(values[0] if values else None, bool):
        return [name] if values[0] else list(param.secondary_opts[:1])
    return [f"{name}={value}" for value in values]


ConfigOption = typer.Option(
    "--config",
    metavar="FILE",
    help="YAML file with any of these options by their long names (and model); flags given here win.",
)
"""For a command whose class is ConfigurableCommand."""
