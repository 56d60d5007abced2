"""The short `--help` of a script with many flags, and the completion of flags and their choices in a shell."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from typing import Any

from tandem.io.installed import HOME

# Flags that the short help explains, in this order, if the script has them.
_BASICS = (
    "image_folder", "video_folder", "audio_data", "dataset", "image_size", "image_sizes", "num_frames", "quantizer",
    "codebook_size", "num_tokens", "condition_on", "init_from", "output_dir", "config", "batch_size",
    "grad_accum_steps", "learning_rate", "epochs", "max_steps", "precision", "valid_fraction", "save_every_n_steps",
    "report_to", "dry_run", "fresh", "distributed_backend", "deepspeed_config",
)  # fmt: skip
_MAX_FLAGS_EXPLAINED = 60  # a script with more flags has a short help
_INDENT = "    "
_PARSERS_IN_COMPLETION: list[argparse.ArgumentParser] = []


def short_help(parser: argparse.ArgumentParser) -> str | None:
    """The text of the short --help; None if the parser has so few flags that --help explains all of them."""
    flags = {action.dest: action for action in parser._actions if action.help is not argparse.SUPPRESS}
    if len(flags) <= _MAX_FLAGS_EXPLAINED:
        return None
    basics = [flags[name] for name in _BASICS if name in flags]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, (), ())
    formatter.add_text(parser.description)
    formatter.start_section("what you need first")
    formatter.add_arguments(basics)
    formatter.end_section()
    width = shutil.get_terminal_size().columns - 2
    lines = ["all other flags, which --help_all explains:"]
    for group in parser._action_groups:
        names = [action.option_strings[0] for action in group._group_actions
                 if action in flags.values() and action not in basics and action.option_strings]  # fmt: skip
        if names:
            text = f"{group.title}: {' '.join(names)}"
            wrap_options: Any = {"break_on_hyphens": False, "break_long_words": False}
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=_INDENT, **wrap_options)
    epilog = f"\n{textwrap.fill(parser.epilog, width, break_on_hyphens=False)}\n" if parser.epilog else ""
    return f"{formatter.format_help()}\n" + "\n".join(lines) + f"\n{epilog}"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions (argcomplete's protocol), and end the process; else do nothing."""
    if "_ARGCOMPLETE" in os.environ and parser not in _PARSERS_IN_COMPLETION:
        import argcomplete

        _PARSERS_IN_COMPLETION.append(parser)  # argcomplete calls the parser again, for the words before the cursor
        for action in parser._actions:
            if action.dest == "config":
                action.completer = _config_files  # type: ignore[attr-defined]
            elif names := getattr(action.type, "known", ()):  # a comma list
                choices = ["none", *names, ",".join(names)]
                action.completer = argcomplete.completers.ChoicesCompleter(choices)  # type: ignore[attr-defined, arg-type]
        argcomplete.autocomplete(parser)


def _config_files(prefix: str, **_: Any) -> list[str]:
    """Files of the working folder, and those that --config finds in configs/ of this repository or package."""
    from argcomplete.completers import FilesCompleter

    config_names = [path.relative_to(HOME).as_posix() for path in sorted((HOME / "configs").rglob("*.yaml"))]
    names: list[str] = list(FilesCompleter()(prefix))
    return names + [name for name in config_names if name.startswith(prefix) and not os.path.exists(name)]


class HelpAll(argparse._HelpAction):
    """--help_all: explain every flag."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.print_help(explain_all=True)
        parser.exit()
