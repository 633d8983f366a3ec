"""Megatron-LM's own program, told by the stand-in: flags, UPGUARD=1 alone, and neither."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bugs.training import compare
from tests.megatron_adapter.merged import events
from upguard_plugin.trace.reader import open_trace

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

HERE = Path(__file__).parent
# Of core_v0.16.1, by the module that defines them; `...` stands for what the adapter never passes.
SIGNATURES = {
    "training": {
        "pretrain": "train_valid_test_dataset_provider model_provider model_type forward_step_func"
        " process_non_loss_data_func extra_args_provider args_defaults get_embedding_ranks"
        " get_position_embedding_ranks non_loss_data_func store inprocess_call_wrapper",
        "setup_model_and_optimizer": "model_provider_func model_type checkpointing_context",
        "train": "forward_step_func model optimizer opt_param_scheduler train_data_iterator"
        " valid_data_iterator process_non_loss_data_func config checkpointing_context"
        " non_loss_data_func inference_model",
        "train_step": "forward_step_func data_iterator model optimizer opt_param_scheduler config"
        " forward_backward_func iteration",
        "training_log": "loss_dict total_loss_dict learning_rate iteration loss_scale"
        " report_memory_flag skipped_iter grad_norm params_norm num_zeros_in_grad"
        " max_attention_logit pg_collection is_first_iteration",
    },
    "checkpointing": {
        "save_checkpoint": "iteration model optimizer opt_param_scheduler"
        " num_floating_point_operations_so_far checkpointing_context ... train_data_iterator ..."
        " tp_group pp_group dp_cp_group",
        "load_checkpoint": "ddp_model optimizer opt_param_scheduler load_arg strict ...",
    },
    "arguments": {"add_megatron_arguments": "parser"},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, and by name the finished process of three trainings, run side by side."""
    folder = tmp_path_factory.mktemp("pretrain")
    flags = ["--upguard", "--upguard-output-dir"]
    started = {
        "flags": _start(folder, [*flags, "runs/flags"]),
        "variable": _start(folder, [], UPGUARD="1", UPGUARD_OUTPUT_DIR="runs/variable"),
        "off": _start(folder, []),
    }
    done = {}
    for name, process in started.items():
        out, error = process.communicate(timeout=300)
        done[name] = subprocess.CompletedProcess(process.args, process.returncode, out, error)
    return folder, done


def test_a_training_prints_the_same_losses_with_and_without_a_flag(ran):
    _, done = ran

    for process in done.values():
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("loss") == 3
    assert done["flags"].stdout == done["variable"].stdout == done["off"].stdout
    assert "upguard" not in done["off"].stderr


def test_a_flag_and_the_variable_record_the_same(ran):
    folder, _ = ran

    verdict = compare(folder / "runs/flags", folder / "runs/variable")

    assert verdict["verdict"] == "identical"
    assert verdict["coverage"]["compared"] > 1000


def test_steps_carry_the_numbers_of_megatron_and_a_repeated_one_is_marked(ran):
    folder, _ = ran
    trace = open_trace(folder / "runs/flags")

    read = [trace.read(0, entry.step) for entry in trace.steps(0)]

    assert [(batch.step, batch.iteration, batch.mark) for batch in read] == [
        (0, 0, None), (1, 1, "rerun"), (2, 2, None),
    ]  # fmt: skip


def test_evaluation_is_recorded_as_such_and_clocks_and_checkpoints_are_not(ran):
    folder, _ = ran
    seen = list(events(folder / "runs/flags"))

    evaluated = {e.step for e in seen if e.key.phase == "eval" and e.key.role == "output"}
    assert evaluated == {1, 2}  # after a step, so it belongs to the next
    between = {e.key.boundary for e in seen if e.key.group is not None and e.key.phase == "start"}
    assert between <= {"barrier[world]"}  # of the evaluation's timer: it has no tensors


def test_the_reduced_loss_is_recorded(ran):
    folder, done = ran
    trace = open_trace(folder / "runs/flags")
    losses = []
    for entry in trace.steps(0):
        batch = trace.read(0, entry.step)
        keys = [batch.key_of(i).boundary for i in range(len(batch))]
        losses.append(float(batch.value[keys.index("lm loss (reduced)")]))

    printed = [float(line.split()[-1]) for line in done["flags"].stdout.splitlines()]
    assert losses == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("checkout", [HERE / "standin", os.environ.get("MEGATRON_LM", "")])
def test_the_seams_have_the_signatures_that_the_adapter_was_written_for(checkout):
    """MEGATRON_LM, the path of a checkout, has the real one checked too."""
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout")
    for module, functions in SIGNATURES.items():
        source = Path(checkout, "megatron/training", f"{module}.py").read_text(encoding="utf-8")
        found = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
        for name, signature in functions.items():
            arguments = [a.arg for a in (*found[name].args.args, *found[name].args.kwonlyargs)]
            assert _fits(arguments, signature.split()), (name, arguments)


def _fits(arguments, pattern):
    """Whether the arguments are those of the pattern, in order; `...` is any number of them."""
    if not pattern:
        return not arguments
    if pattern[0] == "...":
        return any(_fits(arguments[k:], pattern[1:]) for k in range(len(arguments) + 1))
    return bool(arguments) and arguments[0] == pattern[0] and _fits(arguments[1:], pattern[1:])


def _start(folder, flags, **variables):
    inherited = {k: v for k, v in os.environ.items() if "UPGUARD" not in k}
    paths = os.pathsep.join([str(HERE / "standin"), str(HERE.parents[1])])
    return subprocess.Popen(
        [sys.executable, str(HERE / "pretrain_gpt.py"), *flags],
        cwd=folder, env=inherited | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
