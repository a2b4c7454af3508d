"""Functions of each rank in the tests of torchtitan's own Trainer: its optimizer, schedule, metrics and checkpoints.

Its text is replaced, which would be downloaded, and what CPUs and gloo lack: see torchtitan_cases.
"""

from __future__ import annotations

import dataclasses
import os
import time
from types import SimpleNamespace
from unittest import mock

import torch
from torchtitan_cases import _converters, _policy, _use_cpus, _whole, config_of, spec_of

from bench.distributed.titan.config import text_of, without_a_device


def _config(folder, gather, chunked, recipe, resume_at):
    """torchtitan's config of a run of four steps."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    spec = spec_of("debugmodel", _converters(recipe, gather))
    config = config_of(spec, {}, checkpointing=_policy("selective"))
    plain = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    dataloader, tokenizer = text_of(config.model_spec.model.vocab_size)
    return dataclasses.replace(
        config,
        dump_folder=str(folder),
        dataloader=dataloader,
        tokenizer=tokenizer,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=plain) if chunked else plain,
        training=dataclasses.replace(config.training, steps=4),
        metrics=dataclasses.replace(config.metrics, log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, load_step=resume_at),
    )


def train(mesh, folder, gather, chunked=False, recipe="rowwise", resume_at=-1):
    """Train to step four, from the checkpoint of an earlier run's step ``resume_at`` if that is not negative.

    Returns:
        The ``losses`` that the Trainer logs; ``stuck``, the parameters that did not change; ``weights``, a sum of each.
    """
    _use_cpus()
    without_a_device()
    os.environ["LOCAL_RANK"] = str(mesh.get_local_rank())
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

    logged, first = [], {}

    class OnCpus(Trainer):
        def init_distributed(self):
            return ParallelDims.from_config(self.config.parallelism, mesh.size())

        def train(self):
            for module in self.model_parts[0].modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
            first.update({name: _whole(p) for name, p in self.model_parts[0].named_parameters()})
            log = self.metrics_processor.log

            def note(step, loss, *args, **options):
                logged.append(loss)
                log(step, loss, *args, **options)

            self.metrics_processor.log = note
            super().train()

    torch.manual_seed(0)
    trainer = OnCpus(_config(folder, gather, chunked, recipe, resume_at))
    # It sleeps at its end, for other machines.
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    with mock.patch("torchtitan.trainer.time", clock):
        trainer.train()
    now = {name: _whole(p) for name, p in trainer.model_parts[0].named_parameters()}
    trainer.close()
    return {
        "losses": logged,
        "stuck": [name for name, value in now.items() if torch.equal(value, first[name])],
        "weights": [value.sum(dtype=torch.float64).item() for value in now.values()],
    }
