"""Parses flags as Megatron-LM does: once for itself, and again for those who look early."""

import argparse


def add_megatron_arguments(parser):
    """Megatron's own flags, as few as the stand-in needs."""
    parser.add_argument("--train-iters", type=int, default=3)
    parser.add_argument("--save", default=None)
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    """The flags of this process."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args, _ = parser.parse_known_args() if ignore_unknown_args else (parser.parse_args(), None)
    args.curr_iteration = args.iteration = 0
    return args
