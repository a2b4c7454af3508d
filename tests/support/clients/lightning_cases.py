"""Functions of each rank in the tests of Lightning."""

import os
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def batch(step):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def shard(module, mesh):
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def launched():
    """Set the environment variables of torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")


def fabric_losses(mesh, recipe, gather, steps=3):
    """Losses of Fabric with FSDP2, the parameters that did not change, and how many weights FSDP gathers in 8 bits."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from tritonfp8.integrations.lightning import fabric_plugin

    launched()
    plugin = fabric_plugin(recipe, precision="32-true", all_gather=gather)
    strategy = ModelParallelStrategy(shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[plugin])
    fabric.launch()
    module = model()
    before = [p.detach().clone() for p in module.parameters()]
    module = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        loss = module(batch(step)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stuck = [i for i, p in enumerate(module.parameters()) if torch.equal(p.full_tensor(), before[i])]
    return losses, stuck, 0 if plugin.gathered is None else len(plugin.gathered.converted)


class Sharded(lightning.LightningModule):
    """Shards itself in ``configure_model``, as Lightning's documentation shows."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = shard(model(), self.device_mesh)

    def training_step(self, x, index):
        loss = self.model(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


def trainer_losses(mesh, recipe, gather, folder, steps=4, accumulate=1, save=None, resume=None, health=None):
    """Losses of Lightning's Trainer with FSDP2, as :func:`fabric_losses`; ``save`` and ``resume`` are checkpoints.

    ``health`` samples steps, whose figures rank 0 must have in a file.
    """
    from tritonfp8.integrations.lightning import trainer_plugin

    launched()
    plugin = trainer_plugin(recipe, precision="32-true", all_gather=gather, health_every=health)
    world, logger = dist.get_world_size(), CSVLogger(folder) if health else False
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, plugins=[plugin], max_steps=steps, logger=logger, enable_progress_bar=False,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1), default_root_dir=folder,
        enable_model_summary=False, accumulate_grad_batches=accumulate, enable_checkpointing=False,
    )  # fmt: skip
    module, before = Sharded(), list(model().parameters())
    # Two steps an epoch: Lightning resumes at the begin of an epoch's data.
    data = DataLoader([batch(step) for step in range(2 * accumulate)], batch_size=None)
    trainer.fit(module, data, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    if health and dist.get_rank() == 0:
        saved = Path(logger.log_dir, "metrics.csv").read_text()
        assert saved.count("model.") == len(range(0, steps, health))
    stuck = [i for i, p in enumerate(module.parameters()) if torch.equal(p.full_tensor(), before[i])]
    return module.losses, stuck, 0 if plugin.gathered is None else len(plugin.gathered.converted)
