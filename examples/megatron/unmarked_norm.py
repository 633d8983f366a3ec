"""pretrain_gpt.py with a silent bug: the final norm's weight has lost its `sequence_parallel` mark.

Its gradient is then not summed over the tensor-parallel ranks. Run in a checkout of Megatron-LM, as
run_every_layout.sh does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from megatron.training import training

set_up = training.setup_model_and_optimizer


def set_up_and_forget(*args: Any, **kwargs: Any) -> Any:
    """As Megatron's own, which is to mark the weight; then the mark is taken away."""
    result = set_up(*args, **kwargs)
    for chunk in result[0]:
        for name, parameter in chunk.named_parameters():
            if "final_layernorm" in name:
                parameter.sequence_parallel = False
    return result


training.setup_model_and_optimizer = set_up_and_forget
runpy.run_path("pretrain_gpt.py", run_name="__main__")
