"""Functions of each rank in the tests of Hugging Face's Trainer."""

import copy
import functools
import os
import tempfile

import torch
import torch.distributed as dist
from trained_cases import contents

import tritonfp8
from bench.distributed.trainer import Program, Tokens, compare, model_of, reset, train, trainer_of
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.layers.stored import is_stored
from tritonfp8.optim import AdamW

SMALL = {"layers": 2, "hidden": 64, "tokens": 16, "steps": 3, "backend": "aot_eager", "use_cpu": True}


def _shard_on_cpus():
    """Make accelerate use FSDP2 on CPUs. It requires a GPU and would use DDP, but FSDP2 itself needs no GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def act_as_launched():
    """Set the environment variables of torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    _shard_on_cpus()
    torch.set_num_threads(1)


def compare_on_cpus(mesh, **options):
    """:func:`bench.distributed.trainer.compare` on CPUs."""
    act_as_launched()
    return compare(Program(**{**SMALL, **options}))


def train_on_cpus(mesh, **options):
    """:func:`bench.distributed.trainer.train` on CPUs."""
    act_as_launched()
    return train(Program(**{**SMALL, **options}))


def sampled_on_cpus(mesh, every):
    """Losses and final bits of Trainer with FSDP2, and the steps whose health is in its history."""
    from tritonfp8.integrations.transformers import Float8Callback

    act_as_launched()
    program, losses = Program(**SMALL, dtype="float32", accumulate=2), []
    with tempfile.TemporaryDirectory() as folder:
        callback = Float8Callback(program.recipe, health_every=every)
        trainer = trainer_of(program, model_of(program), folder, program.steps, losses, [callback])
        trainer.train()
    final = [p.full_tensor().tolist() for p in trainer.model.parameters()]
    logged = [entry["step"] for entry in trainer.state.log_history if "fp8/worst_layer" in entry]
    reset()
    return losses, final, logged


def _loop(program, model, optimizer, rows=None, folder=None, resume=False, **options):
    """Sharded model and losses of a loop with accelerate, which loads and saves its state in ``folder``."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"]}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrap, **options))
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for row in Tokens(6, program.tokens).rows.chunk(2)[dist.get_rank()] if rows is None else rows:
        loss = model(input_ids=row[None], labels=row[None]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None:
        accelerator.save_state(folder)
    return model, losses


def accelerate_loop(mesh, gather, order, recipe):
    """Losses of a loop with accelerate, and parameters that did not change. The optimizer is made before sharding."""
    act_as_launched()
    program = Program(**SMALL, dtype="float32")
    model = model_of(program)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if order == "optimizer first" else None
    tritonfp8.convert(model, recipe)
    if gather:
        enable_float8_all_gather(model)
    model, losses = _loop(program, model, optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3))
    stuck = [name for name, p in model.named_parameters() if torch.equal(p.full_tensor(), before[name])]
    reset()
    return losses, stuck


def _with_adapters(program, recipe, stored):
    """A model with adapters, whose base is stored in 8 bits, or has the same values in bf16."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj" if program.experts else "up_proj"]
    model = get_peft_model(model_of(program), LoraConfig(target_modules=targets, r=4))
    values = copy.deepcopy(model)
    tritonfp8.convert(values, recipe, weight_storage="quantized")
    if stored:
        return values
    model.load_state_dict(values.state_dict())
    tritonfp8.convert(model, recipe)
    return model


def _adapters(model):
    return {
        name: p.full_tensor().detach().float().flatten().tolist()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _of_adapters(model, losses):
    """Losses, the number of stored layers, and trained adapters."""
    kept, adapters = sum(map(is_stored, model.modules())), _adapters(model)
    reset()
    return losses, kept, adapters


def lora_by_accelerate(mesh, stored, ram_efficient):
    """Results of a loop with accelerate."""
    act_as_launched()
    program = Program(**SMALL, dtype="bfloat16")
    model = _with_adapters(program, "mxfp8", stored)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return _of_adapters(*_loop(program, model, optimizer, cpu_ram_efficient_loading=ram_efficient))


def lora_by_trainer(mesh, stored, **options):
    """As :func:`lora_by_accelerate`, of Trainer with FSDP2."""
    act_as_launched()
    options = {"recipe": "rowwise", "dtype": "bfloat16", "learning_rate": 1e-2, **options}
    program = Program(**{**SMALL, **options})
    model = _with_adapters(program, program.recipe, stored)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(program, model, folder, program.steps, losses, [])
        trainer.train()
    return _of_adapters(trainer.model, losses)


def _trained_in_8_bits(program, recipe):
    model = model_of(program)
    tritonfp8.convert(model, recipe, weight_storage="quantized")
    return model


def _of_codes(losses, kept, before, after):
    """Losses, the number of stored layers, what did not change, and the codes."""
    stuck = [name for name, x in after.items() if name in before and torch.equal(x, before[name])]
    return losses, kept, stuck, {name: x.tolist() for name, x in after.items()}


def stored_by_trainer(mesh, recipe, folder, resume):
    """Results of Trainer with FSDP2 and our AdamW."""
    act_as_launched()
    program = Program(**{**SMALL, "steps": 4, "recipe": recipe, "dtype": "float32", "resume": True})
    losses = []
    for index, steps in enumerate((2, 4) if resume else (4,)):
        model = _trained_in_8_bits(program, recipe)
        before = contents(model)
        trainer = trainer_of(program, model, folder, steps, losses, [])
        # The Trainer makes the optimizer after it has sharded the model, and refuses one that is made before.
        trainer.optimizer_cls_and_kwargs = AdamW, {"lr": 1e-3, "moments": "bf16", "seed": 5}
        trainer.train(resume_from_checkpoint=index > 0 or None)
        kept, after = sum(map(is_stored, trainer.model.modules())), contents(trainer.model)
        reset()
    return _of_codes(losses, kept, before, after)


def pretrained_by_trainer(mesh, checkpoint, folder, mode, resume=False, plain=None):
    """As :func:`lora_by_trainer` or :func:`stored_by_trainer`, of a checkpoint, by the Trainer's own optimizer.

    Args:
        mesh, folder: as there.
        checkpoint: the folder of a checkpoint of Qwen3 in 8 bits.
        mode: ``train`` of ``from_pretrained``.
        resume: whether the run is stopped after the half, and goes on.
        plain: a recipe; then the base has the same values in float32, and quantizes them.
    """
    import peft

    from tritonfp8.integrations.transformers import from_pretrained

    act_as_launched()
    program = Program(**{**SMALL, "steps": 4, "dtype": "float32", "learning_rate": 1e-3, "resume": True})
    losses = []
    for index, steps in enumerate((2, 4) if resume else (4,)):
        model = from_pretrained(checkpoint, train=mode, dtype=torch.float32)
        if plain is not None:
            tritonfp8.revert(model)
            tritonfp8.convert(model, plain)
        before = contents(model)
        if mode == "adapters":
            torch.manual_seed(0)
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"]))
        trainer = trainer_of(program, model, folder, steps, losses, [])
        trainer.train(resume_from_checkpoint=index > 0 or None)
        model = trainer.model
        kept = sum(map(is_stored, model.modules()))
        after, adapters = contents(model), _adapters(model)
        reset()
    return (losses, kept, adapters) if mode == "adapters" else _of_codes(losses, kept, before, after)


def stored_by_accelerate(mesh, recipe, folder, resume):
    """As :func:`stored_by_trainer`, of a loop with accelerate that saves and loads its state."""
    act_as_launched()
    program = Program(**SMALL, dtype="float32")
    losses, rows = [], Tokens(8, program.tokens).rows.chunk(2)[dist.get_rank()]
    for part in (rows[:2], rows[2:]) if resume else (rows,):
        model = _trained_in_8_bits(program, recipe)
        before = contents(model)
        optimizer = AdamW(model.parameters(), lr=1e-3, moments="bf16", seed=5)
        of_codes = {"folder": folder, "resume": bool(losses), "state_dict_type": "SHARDED_STATE_DICT"}
        model, found = _loop(program, model, optimizer, part, **of_codes)
        losses += found
        kept, after = sum(map(is_stored, model.modules())), contents(model)
        reset()
    return _of_codes(losses, kept, before, after)
