"""Reads a YAML config whose keys are flag names, with the converters that the command line uses."""

import argparse
from collections.abc import Callable, Container, Mapping
from typing import Any

import yaml

from tandem.io.installed import command_of, find_shipped_file, similar_files
from tandem.io.reading import compose_yaml, error_text

from .converters import Joined, Names, choice_error, config_value, expand_path

_BOOL, _NULL = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"
_CONVERSION_ADVICE = (
    f"`{' '.join(command_of('convert.py'))} config OLD NEW.yaml` makes one of a configuration of taming-transformers, "
    "latent diffusion or DALLE2-pytorch"
)


def read_flags(
    path: str,
    flags: Mapping[str, argparse.Action],
    command_line_only: Container[str],
    hint: Callable[[str, list[str], list[str]], str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values, and the keys that set them, by dest name from a YAML mapping.

    A scalar is converted from its text in the file, so that `1e-4` (a string in YAML 1.1) is a number, and 2024 may be
    the name of a folder. A switch needs a YAML boolean, a flag with several values a list; values that the command line
    joins, such as 0.5,0.9 or 128x192, may be a list. null is accepted for flags whose default is None, and keeps the
    default. YAML tags construct nothing.

    Args:
        path: Of a file, or of one in configs/ (`find_shipped_file`).
        flags: Flags by name with underscores; aliases of a flag map to the same action.
        command_line_only: Names of flags that a config file may not set.
        hint: (a name that is no flag, the flags, all keys of the file) -> the end of the error's line: ": " and advice,
            "; did you mean x?", or "".

    Raises:
        ValueError: one line with file, line and key, for anything that is not a known flag with a fitting value.
    """
    config: dict[str, Any] = {}
    keys: dict[str, str] = {}
    nodes = _read_mapping(find_shipped_file(path))
    for key_node, value_node in nodes:
        position = f"{path}, line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{position}: a key must be the name of a flag")
        key = key_node.value
        name = key.replace("-", "_")
        if name in command_line_only:
            raise ValueError(f"{position}: {key} belongs on the command line, not in a config file")
        if name not in flags:
            file_keys = [str(node.value).replace("-", "_") for node, _ in nodes]
            suggestion = hint(name, list(flags), file_keys)
            if isinstance(value_node, yaml.MappingNode) and not suggestion.startswith(":"):  # at most a guess
                suggestion = f": its value is a mapping, and no flag takes one; {_CONVERSION_ADVICE}"
            raise ValueError(f"{position}: unknown key {key!r}{suggestion}")
        action = flags[name]
        if action.dest in keys:
            raise ValueError(f"{position}: {key} was already set by the key {keys[action.dest]!r}; keep one of them")
        keys[action.dest] = name
        if value_node.tag == _NULL and action.default is None:
            continue
        try:
            config[action.dest] = _convert(value_node, action)
        except ValueError as error:
            raise ValueError(f"{position}: {key}: {error}") from None
    return config, keys


def convert_value(value: Any, action: argparse.Action) -> Any:
    """A value of JSON's types, converted as the flag converts text.

    Raises:
        ValueError: one line, if the value does not fit the flag.
    """
    try:
        node = yaml.compose(yaml.safe_dump(config_value(action, value)), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(error_text(error)) from None
    assert node is not None
    return _convert(node, action)


def _read_mapping(path: str) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        root = compose_yaml(path)
    except OSError as error:
        raise ValueError(f"cannot read the config {path}: {error_text(error)}{similar_files(path, error)}") from None
    except ValueError as error:
        raise ValueError(f"cannot read the config {path} as YAML: {error_text(error)}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"the config {path} must be a mapping of flags to values, such as `batch_size: 8`")
    return root.value


def _convert(node: yaml.Node, action: argparse.Action) -> Any:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        is_true = yaml.SafeLoader.bool_values.get(str(node.value).lower()) if node.tag == _BOOL else None
        if is_true is None:
            raise ValueError(f"expected true or false, got {_describe(node)}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return is_true
        return action.const if is_true else action.default
    if action.nargs in (None, "?"):
        return _convert_scalar(node, action)
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if len(nodes) != action.nargs and (action.nargs != "+" or not nodes):
        expected = "at least one value" if action.nargs == "+" else f"{action.nargs} values"
        raise ValueError(f"expected a list of {expected}, got {len(nodes)}")
    return [_convert_scalar(element, action) for element in nodes]


def _convert_scalar(node: yaml.Node, action: argparse.Action) -> Any:
    convert = action.type if callable(action.type) else str
    if isinstance(convert, (Joined, Names)) and isinstance(node, yaml.SequenceNode):
        text = _join(node, convert)
    else:
        text = _scalar_text(node, convert)
    try:
        value = convert(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    except (ValueError, TypeError):
        raise ValueError(f"expected {getattr(convert, '__name__', 'another value')}, got {_describe(node)}") from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(choice_error(value, action.choices))
    return value


def _join(node: yaml.SequenceNode, convert: Joined[Any] | Names) -> str:
    """The elements of a list as the text of a command line."""
    texts = [_scalar_text(element, convert) for element in node.value]
    if not texts and isinstance(convert, Joined):
        raise ValueError("expected at least one value, got an empty list")
    if text := next((text for text in texts if convert.separator in text), None):
        raise ValueError(f"expected values without {convert.separator!r} in the list, got {text!r}")
    return convert.text(texts)


def _scalar_text(node: yaml.Node, convert: Callable[[str], Any]) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"expected a single value, got {_describe(node)}")
    takes_any_text = getattr(convert, "convert", convert) in (str, expand_path)  # a `Converter` holds the function
    if takes_any_text and node.tag in (_BOOL, _NULL):
        raise ValueError(f"expected text, and YAML reads {_describe(node)} as another type; put it in quotes")
    return str(node.value)


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
