"""Functions of each rank in the tests of DeepSpeed."""

import functools
import logging
import os

import mixtures
import torch
from callback_cases import llama
from trainer_cases import act_as_launched
from transformers import Trainer, TrainingArguments

from bench.distributed.trainer import VOCABULARY, Tokens, reset
from tritonfp8.integrations.transformers import Float8Callback, Float8Config
from tritonfp8.layers.linear import is_converted
from tritonfp8.layers.moe import is_converted_experts


def _train_on_cpus():
    """Make accelerate use DeepSpeed on CPUs. It requires a GPU and would use DDP, but DeepSpeed itself needs no GPU."""
    import deepspeed
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    # DeepSpeed would compile a C++ extension for all-reduces on CPUs, which takes a minute; without it gloo serves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    original = AcceleratorState.__init__
    if getattr(original, "trains_on_cpus", False):
        return

    @functools.wraps(original)
    def init(self, *args, deepspeed_plugin=None, **kwargs):
        original(self, *args, deepspeed_plugin=deepspeed_plugin, **kwargs)
        if deepspeed_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
            precision, self._mixed_precision = self._mixed_precision, "no"
            deepspeed_plugin.set_mixed_precision(precision)
            deepspeed_plugin.select(_from_accelerator_state=True)
            self.deepspeed_plugins = deepspeed_plugin

    init.trains_on_cpus = True
    AcceleratorState.__init__ = init


class Records(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


class Restore(Float8Callback):
    """Gives a parameter back its first value after each step, which is inside of the backward pass."""

    def __init__(self, parameter):
        super().__init__("rowwise")
        self.parameter, self.value = parameter, parameter.detach().clone()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.parameter.data.copy_(self.value)
        super().on_pre_optimizer_step(*args, **kwargs)


def _settings(folder, stage, bfloat16, norm, changes):
    engine = {
        "zero_optimization": {"stage": stage, **({} if norm else {"compute_grad_norm": False})},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bfloat16},
        **dict.fromkeys(
            (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
                "gradient_clipping",
            ),
            "auto",
        ),
    }
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "bf16": bfloat16,
        "max_grad_norm": 1.0 if norm else 0.0,
        "deepspeed": None if stage is None else engine,
    }
    return TrainingArguments(**{**options, **changes})


def train(
    mesh, folder, stage=None, bfloat16=False, frozen=None, poison=None, norm=True, resume=None, recipe="rowwise",
    family=None, **changes
):  # fmt: skip
    """Train four steps by a Trainer with the callback: with DeepSpeed ZeRO of a stage, or by DDP.

    ``frozen``: a parameter that every step gives back its old value. ``poison``: one that becomes NaN. ``norm``:
    whether DeepSpeed computes the norm of the gradients. ``resume``: folder of a checkpoint. ``family``: of a mixture
    of experts, which are converted, too; without it a Llama trains. ``changes``: other arguments of the Trainer.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    act_as_launched()
    _train_on_cpus()
    model = llama(VOCABULARY) if family is None else mixtures.model_of(family, vocab_size=VOCABULARY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if poison:
        model.get_parameter(poison).data.fill_(float("nan"))
    config = Float8Config(recipe)
    callback = Restore(model.get_parameter(frozen)) if frozen else Float8Callback(config)
    records, logger = Records(), logging.getLogger("tritonfp8")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    try:
        args = _settings(folder, stage, bfloat16, norm, changes)
        run = Trainer(model=model, args=args, train_dataset=Tokens(64, 12), callbacks=[callback])
        run.train(resume_from_checkpoint=resume)
        now = {name: p.detach() for name, p in model.named_parameters()}
        return {
            "wrapped": type(run.model_wrapped).__name__,
            "converted": sum(is_converted(module) for module in model.modules()),
            "experts": sum(is_converted_experts(module) for module in model.modules()),
            "stuck": [name for name, old in before.items() if torch.equal(now[name], old.to(now[name].dtype))],
            "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
            "weights": [p.sum(dtype=torch.float64).item() for p in now.values()],
            "messages": records.messages,
        }
    finally:
        logger.removeHandler(records)
        reset()
        # The Trainer tells accelerate by this, which else would wrap the model of the next run without DeepSpeed, too.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
