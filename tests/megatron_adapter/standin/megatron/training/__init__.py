"""Stands in for Megatron-LM's `megatron.training`, which is in no package registry.

Its functions have the real ones' names and signatures (core_v0.16.1), and call each other as those
do; the model and the schedule are those of megatron-core.
"""

from megatron.training.training import pretrain

__all__ = ["pretrain"]
