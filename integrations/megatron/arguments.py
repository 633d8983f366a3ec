"""The flags of Megatron-LM: `--upguard` and kin.

In:  Megatron's argument parser, which is made several times in a process.
Out: flags in it; afterwards the settings that they, the environment and a file make.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upguard_plugin.config import UpGuardConfig


def add_upguard_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add UpGuard's flags to a parser that has none of them yet, and return it.

    Fits `extra_args_provider` of `pretrain()`.
    """
    if "--upguard" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="upguard")
    group.add_argument(
        "--upguard", action="store_true", default=None,
        help="record fingerprints of this training, to be compared with another's",
    )  # fmt: skip
    group.add_argument("--upguard-output-dir", metavar="DIR", help="where the trace goes")
    group.add_argument(
        "--upguard-level", choices=("stage", "module", "op"), help="how much is recorded"
    )
    group.add_argument("--upguard-config", metavar="FILE", help="further settings, JSON or YAML")
    return parser


def settings_of(args: Any) -> UpGuardConfig | None:
    """The settings that Megatron's parsed arguments and the environment make; None: off.

    Raises ConfigError for a wrong setting.
    """
    from upguard_plugin.config import environment_switch, load_config  # not needed where it is off

    if not getattr(args, "upguard", None) and environment_switch() is not True:
        return None
    flags = {"output_dir": "upguard_output_dir", "level": "upguard_level"}
    given = {
        field: value
        for field, flag in flags.items()
        if (value := getattr(args, flag, None)) is not None
    }
    settings = load_config(getattr(args, "upguard_config", None), flags=given)
    return settings if settings.enabled else None
