"""The features of docs/compatibility.md as data: for each, the tests that show whether a recipe works with it."""

from __future__ import annotations

from docs.coverage import COLUMNS, Column

_CONVERT = "tests/test_convert.py"
_SAVED = f"{_CONVERT}::TestCheckpoints::test_transformers_save_and_load"
_FUNCTION = "tests/layers/linear/test_function.py::TestLinear"
_CHECKPOINTING = "tests/layers/linear/test_function.py::TestCheckpointing::test_changes_nothing_but_what_is_recomputed"
_INPUTS = "tests/layers/linear/test_input_cache.py"
_CACHE = "tests/layers/linear/test_weight_cache.py"
_COMPILE = "tests/layers/linear/test_compile.py"
_TRANSFORMS = "tests/layers/test_transforms.py"
_TRACED = "tests/layers/linear/test_traced.py"
_EVERY_TRACE = f"{_TRACED}::test_every_gradient_of_a_traced_model_is_that_of_eager"
_ACCELERATE_HOOKS = "tests/layers/test_in_place.py::TestForwardsOnTheInstance::test_hooks_of_accelerate"
_STORED = "tests/layers/stored/test_"
_SHARDS = "tests/distributed/fsdp/test_stored.py::test_the_bits_of_one_rank"
_SHARDED_MXFP4 = "tests/distributed/fsdp/test_stored.py::test_mxfp4_is_sharded_between_rows"
_BY_ROWS = "Codes of `mxfp4_weights` are cut between rows only, so `RowwiseParallel` is an error."
_EXPERTS = "tests/layers/moe/test_experts.py::TestTransformers::test_ten_steps_are_those_of_a_loop_over_experts"
_EXPORT = "tests/export/test_codes.py::test_equal_specs_keep_the_values_and_most_codes"
_SHARDED_EXPORT = "tests/export/test_sharded.py::test_fsdp2_that_left_weights_gathered"
_SCHEDULE = "tests/workflow/test_schedule.py"
_FSDP = "tests/distributed/fsdp/test_fsdp.py"
_GRADIENTS = "tests/distributed/gradients/test_"
_WITH_ACCELERATE = "tests/clients/test_accelerate.py"
_EMA = "tests/distributed/fsdp/test_ema.py"
_CHUNKED = "tests/distributed/fsdp/test_chunked_loss.py"
_TP = "tests/distributed/tensor_parallel/test_"
_COMPILED_TP = (
    f"{_TP}tensor_parallel.py::test_compiled_llama_trains_as_one_process",
    f"{_TP}modules.py::test_compiled_module_is_one_graph_of_the_same_bytes",
)
_WEIGHT_SCOPE = "tests/distributed/test_weight_scope.py"
_CALLBACK = "tests/clients/test_callback.py"
_RESTORED = f"{_CALLBACK}::test_a_saved_model_is_restored_with_its_recipes"
_SCHEDULED = f"{_CALLBACK}::test_a_scheduled_run_is_resumed_to_the_same_bits"
_TRAINER = "tests/clients/test_trainer.py"
_LIGHTNING = "tests/clients/test_lightning.py"
_ZERO = "tests/clients/test_deepspeed.py"
_TITAN = "tests/clients/test_torchtitan.py::test_all_parameters_train_and_the_gather_changes_no_bit"
_TITAN_TRAINER = (
    "tests/clients/test_torchtitan_trainer.py::test_the_gather_changes_no_bit_and_a_run_goes_on_from_its_checkpoint"
)
_TITAN_EXPERTS = "tests/clients/test_torchtitan.py::test_experts"
_PAIRS = "rowwise_hp_grad_weight-rowwise", "tensorwise-rowwise", "blockwise-mxfp8"
_INVARIANT = "tests/conversion/test_invariant.py::test_rows_are_those_of_a_larger_batch"
_NO_SCALES_OF_ROWS = "no: `ValueError`", "tests/conversion/test_invariant.py::test_what_cannot_be_invariant_is_an_error"
_NOT_INVARIANT = dict.fromkeys(("bf16", "tensorwise"), _NO_SCALES_OF_ROWS)

_NOT_STORED = {"bf16": ("no: `ValueError`", f"{_STORED}stored.py::test_a_recipe_without_a_quantized_weight_is_refused")}
_GENERATES = "tests/rollout/test_generator.py::test_"
_NO_ROLLOUT = {"tensorwise": ("no: `ValueError`", f"{_GENERATES}a_recipe_that_has_no_rollout")}
_SAME_CODE = "Same code."
_NOT_GATHERED = "Weights of `bf16` are not gathered in 8 bits."
_NO_CODES = "Layers of `bf16` are exported in 8 bits if a filter names them."
_CHECKPOINT = "A checkpoint has the keys and the dtypes of `nn.Linear`: codes are never saved."


def _both(test: str) -> dict[str, str]:
    """A test that begins in bf16 and goes on in FP8."""
    return {"bf16": test, "rowwise": test}


ONE_PROCESS = (
    Column("forward and backward, eager", (f"{_FUNCTION}::test_is_the_recipe_to_the_bit",)),
    Column("odd sizes and tails", (f"{_FUNCTION}::test_any_leading_dims_and_sizes",)),
    Column("empty batches and dims", (f"{_FUNCTION}::test_empty_dims",)),
    Column("autocast", (f"{_FUNCTION}::test_autocast",)),
    Column("no_grad and inference_mode", (f"{_FUNCTION}::test_no_grad_and_inference_mode",)),
    Column("gradient accumulation", (f"{_FUNCTION}::test_gradients_accumulate",)),
    Column("quantize_weights_once", (f"{_CACHE}::test_same_bits",)),
    Column("activation checkpointing", (_CHECKPOINTING,), known="Reentrant, not reentrant, and selective."),
    Column(
        "selective checkpointing of layers that share an input",
        (f"{_INPUTS}::test_selective_checkpointing_inside_the_parent",),
    ),
    Column("layers that share an input", (f"{_INPUTS}::test_same_bits_and_one_cast",)),
    Column(
        'weights stored in 8 bits (`mode="inference"`)',
        (f"{_STORED}stored.py::test_a_stored_model_is_the_plain_model_of_its_values",),
        otherwise=_NOT_STORED,
        known="Frozen weights. `tensorwise` gets power-of-two scales.",
    ),
    Column("batch_invariant=True", (f"{_INVARIANT}_and_of_training",), otherwise=_NOT_INVARIANT),
    Column("Conv1D of transformers", ("tests/layers/linear/test_conv1d.py::test_computes_as_a_linear_layer",)),
    Column(
        "second derivative",
        (f"{_FUNCTION}::test_a_gradient_of_the_gradient_is_an_error",),
        answer="no: `RuntimeError`",
        known="Rounding to 8 bits has no derivative. A layer of `bf16` gives the same error.",
    ),
    Column(
        "swap_recipe", ("tests/conversion/test_swap.py::test_a_swapped_model_computes_as_one_converted_to_the_recipe",)
    ),
    Column(
        "RecipeSchedule, also compiled",
        (f"{_SCHEDULE}::test_a_recipe_seen_before_compiles_nothing",),
        fixed={"bf16": f"{_SCHEDULE}::test_a_recipe_seen_before_compiles_nothing"},
        known="At most as many recipes as Dynamo compiles.",
    ),
    Column(
        "schedule saved and resumed",
        (f"{_SCHEDULE}::test_a_run_goes_on_from_a_checkpoint_to_the_same_bits",),
        fixed={"bf16": f"{_SCHEDULE}::test_a_run_goes_on_from_a_checkpoint_to_the_same_bits"},
        known="Its state is the number of the next step.",
    ),
    Column(
        "safetensors", (f"{_CONVERT}::TestCheckpoints::test_safetensors_to_a_plain_model_and_back",), known=_CHECKPOINT
    ),
    Column(
        "torch.save, with the optimizer",
        (f"{_CONVERT}::TestCheckpoints::test_torch_save_needs_no_pickled_code",),
        known=_CHECKPOINT,
    ),
    Column("save_pretrained and from_pretrained", (_SAVED,), known=_CHECKPOINT),
    Column("export in 8 bits, and load", (_EXPORT,), known=_NO_CODES),
    Column(
        "Rollout: generate with the trainer's codes",
        (
            f"{_GENERATES}after_each_step_a_rollout_has_the_codes_and_logits_of_the_trainer",
            f"{_GENERATES}layers_of_a_recipe_in_high_precision_are_shared",
        ),
        otherwise=_NO_ROLLOUT,
    ),
    Column(
        "CPU offload of accelerate",
        (_ACCELERATE_HOOKS,),
        known="`cpu_offload` and `dispatch_model` replace the forward on the instance; a converted layer keeps both.",
    ),
    Column(
        "EMA: AveragedModel, weights swapped in and out",
        ("tests/conversion/test_ema.py::test_averaged_model_keeps_the_recipes_and_follows_the_weights",),
        known="Swap outside of `quantize_weights_once`; inside it is a `RuntimeError`.",
    ),
    Column(
        "losses in chunks: F.linear(x, head.weight)",
        (f"{_CHUNKED}::test_without_sharding_a_converted_head_is_the_matrix_of_the_loss",),
        known="Such a product is in high precision with any recipe: it reads the weight, and not the layer.",
    ),
    Column("experts in 3-D parameters", (_EXPERTS,)),
    Column("stored experts", (f"{_STORED}matrices.py::test_the_bits_of_plain_experts",), otherwise=_NOT_STORED),
    Column("experts in a list of linear layers", ("tests/conversion/test_coverage.py::test_experts_in_a_list",)),
    Column(
        "experts in one 3-D tensor",
        always=("tests/conversion/test_coverage.py::test_experts_in_one_tensor",),
        answer="no: reported",
        known="They stay in high precision, and the report of `convert` names them with their share of the FLOPs.",
    ),
    Column("verify", ("tests/workflow/test_verify.py::test_every_recipe_shows_what_its_gemms_run",)),
    Column(
        "verify_training",
        ("tests/workflow/test_verify_training.py::test_weights_that_move_pass",),
        known="It compares parameters before and after a step, which no recipe changes.",
    ),
    Column("monitor", ("tests/workflow/health/test_monitor.py::test_a_healthy_model_has_no_findings",)),
    Column("sensitivity", ("tests/workflow/health/test_sensitivity.py::test_an_error_is_that_of_the_layer",)),
    Column(
        "quantize_ of torchao on the same layer",
        always=(
            "tests/conversion/test_partial.py::TestTorchao::test_quantize_before",
            "tests/conversion/test_partial.py::TestTorchao::test_quantize_after",
        ),
        answer="no: `TypeError`",
        known="The message names the layer. Leave it out of one of them by its filter: the others work.",
    ),
    Column(
        "convert_to_float8_training of torchao on the same layer",
        always=(
            "tests/conversion/test_partial.py::TestTorchao::test_training_before",
            f"{_WITH_ACCELERATE}::test_fp8_of_accelerate_is_an_error_that_says_what_to_set",
        ),
        answer="no: `TypeError`",
        known="As above.",
    ),
)

GRAPHS = (
    Column("torch.compile", (f"{_COMPILE}::test_linear_is_eager_to_the_bit", f"{_COMPILE}::test_llama_is_one_graph")),
    Column(
        "torch.compile, dynamic tokens",
        (
            f"{_COMPILE}::test_one_graph_with_mark_dynamic",
            f"{_COMPILE}::test_odd_numbers_of_tokens_take_no_graph_of_their_own",
        ),
        known="`blockwise` and `mxfp8` take one more graph for tokens that fill a single block.",
    ),
    Column("torch.compile, activation checkpointing", (f"{_COMPILE}::test_activation_checkpointing_inside_the_graph",)),
    Column("torch.compile, quantize_weights_once", (f"{_COMPILE}::test_weights_quantized_once_take_one_more_graph",)),
    Column(
        'CUDA graphs, mode="reduce-overhead"',
        (f"{_COMPILE}::test_cuda_graphs_of_compiled_layers_replay_the_same_bits",),
        answer="yes, on a GPU",
        gpu=True,
    ),
    Column("torch.export", (f"{_TRACED}::test_every_recipe_trains_as_exported",)),
    Column("torch.jit.trace", (_EVERY_TRACE,), "jit", known="The graph has the same op as with `torch.export`."),
    Column("make_fx", (_EVERY_TRACE,), "make_fx", known="The graph has the same op as with `torch.export`."),
    Column(
        "torch.jit.script",
        (f"{_TRACED}::test_other_tracers_are_errors",),
        "jit.script",
        answer="no: `TypeError`",
        known="TorchScript compiles no code of other packages. Use `torch.export` or `torch.jit.trace`.",
    ),
    Column(
        "torch.fx.symbolic_trace",
        (f"{_TRACED}::test_other_tracers_are_errors",),
        "symbolic_trace",
        answer="no: `TypeError`",
        known="A layer checks its input, and a `Proxy` is no tensor. Use `make_fx` or `torch.export`.",
    ),
    Column("torch.func.functional_call", ("tests/layers/linear/test_module.py::test_functional_call_and_hooks",)),
    Column("torch.func.grad", (f"{_TRANSFORMS}::test_grad_is_that_of_autograd",)),
    Column(
        "torch.func.vmap",
        (f"{_TRANSFORMS}::test_vmap_over_inputs_is_a_loop_over_them",),
        known="Every sample is quantized by itself.",
    ),
    Column("gradients of samples, vmap of grad", (f"{_TRANSFORMS}::test_gradients_of_samples_are_those_of_a_loop",)),
    Column("torch.func.jacrev", (f"{_TRANSFORMS}::test_jacrev_is_one_backward_for_each_output",)),
    Column(
        "forward mode: torch.func.jvp, jacfwd, hessian",
        (f"{_TRANSFORMS}::test_forward_mode_is_an_error_that_names_the_package",),
        answer="no: `RuntimeError`",
        known="Layers have no rule for tangents. Use reverse mode.",
    ),
    Column("FlopCounterMode", ("tests/ops/test_flops.py::test_of_forward_and_backward",)),
    Column(
        "FLOP counts of thop and fvcore",
        ("tests/conversion/test_counters.py::test_their_tables_get_an_entry",),
        known="They count by the type of the module, which is one for all recipes.",
    ),
)

SHARDED = (
    *COLUMNS,
    Column(
        "DDP",
        (f"{_TRAINER}::test_trainer_with_distributed_data_parallel",),
        known="Parameters are plain, and so are their gradients.",
    ),
    Column("TP, torch.compile", _COMPILED_TP, known=_SAME_CODE),
    Column(
        "TP, local scales",
        (f"{_TP}layers.py::test_local_scales_are_as_accurate_as_global_ones",),
        known="`bf16` has no scales.",
    ),
    Column("TP, quantize_weights_once", (f"{_WEIGHT_SCOPE}::test_tensor_parallel",), known=_SAME_CODE),
    Column(
        "FSDP2, gather in bf16",
        (f"{_FSDP}::test_losses_with_fp8_all_gather_equal_those_without",),
        fixed={"bf16": f"{_FSDP}::test_weights_that_no_gemm_reads_in_8_bits"},
    ),
    Column("FSDP2, torch.compile", (f"{_FSDP}::test_option",), "compile", known=_SAME_CODE),
    Column(
        "FSDP2, activation checkpointing",
        (f"{_FSDP}::test_gathered_bytes_where_forward_is_recomputed", f"{_FSDP}::test_option"),
        "recompute",
        known="A weight of `bf16` is gathered as without this package.",
    ),
    Column("FSDP2, CPU offload", (f"{_FSDP}::test_option",), "offload", known=_NOT_GATHERED),
    Column("FSDP2, gradient accumulation", (f"{_FSDP}::test_option",), "accumulate", known=_NOT_GATHERED),
    Column("FSDP2, gradients in 8 bits", always=(f"{_GRADIENTS}reduce_scatter.py::test_gradients_are_near_float32",)),
    Column("FSDP2, quantize_weights_once", (f"{_WEIGHT_SCOPE}::test_fsdp",), known=_NOT_GATHERED),
    Column(
        "FSDP2, EMA weights swapped in and out",
        (f"{_EMA}::test_evaluations_are_those_of_the_weights_that_were_swapped_in",),
        known="`bf16` is plain FSDP2: `reshard()` before each swap. `param.data = ...` on a shard is a `RuntimeError`.",
    ),
    Column(
        "FSDP2, losses in chunks: F.linear(x, head.weight)",
        (f"{_CHUNKED}::test_the_gather_changes_no_bit",),
        known="A head that is gathered in 8 bits is gathered in high precision too; a warning says so.",
    ),
    Column("FSDP2, export.tensors", (_SHARDED_EXPORT,), known=_NO_CODES),
    Column("FSDP2, weights stored in 8 bits", (f"{_SHARDS}_under_fsdp2", _SHARDED_MXFP4), otherwise=_NOT_STORED),
    Column("TP x FSDP2, weights stored in 8 bits", (f"{_SHARDS}_under_tp_and_fsdp2",), "", _NOT_STORED, known=_BY_ROWS),
    Column(
        "Pipeline, FP8 all-gather",
        ("tests/distributed/test_pipeline.py::test_fp8_all_gather_inside_stages_changes_no_bit",),
        known=_NOT_GATHERED,
    ),
    Column(
        "Pipeline, quantize_weights_once",
        ("tests/distributed/test_pipeline.py::test_weights_quantized_once_for_all_micro_batches",),
    ),
    Column(
        "Expert parallelism (torchtitan, with TP and FSDP2)",
        fixed={name: f"{_TITAN_EXPERTS}[{pair}]" for pair in _PAIRS for name in pair.split("-")},
        known="Experts, too, unless they cannot follow the recipe: the report says so.",
    ),
)

CLIENTS = (
    Column(
        "Hugging Face's Trainer, Float8Callback",
        (f"{_CALLBACK}::test_the_callback_trains_as_convert_before_the_trainer",),
        known="Its report names the recipe of each layer.",
    ),
    Column(
        "Trainer, saved and restored",
        fixed={
            **dict.fromkeys(("rowwise", "blockwise", "mxfp8"), f"{_RESTORED}[names0]"),
            **dict.fromkeys(("bf16", "tensorwise", "rowwise_hp_grad_weight"), f"{_RESTORED}[names1]"),
            "mxfp4_weights": f"{_RESTORED}[names2]",
        },
    ),
    Column("Trainer, schedule, resumed", (_SCHEDULED,), fixed={"bf16": _SCHEDULED}),
    Column("Trainer with FSDP2, FP8 all-gather", (f"{_TRAINER}::test_trainer",), known=_NOT_GATHERED),
    Column("Trainer with FSDP2, torch.compile", (f"{_TRAINER}::test_trainer",), "compiled", known=_SAME_CODE),
    Column("Trainer with FSDP2, resumed", (f"{_TRAINER}::test_trainer",), "resumed", known=_SAME_CODE),
    Column(
        "accelerate with FSDP2",
        (f"{_TRAINER}::test_accelerate_with_an_optimizer_made_before",),
        known=_NOT_GATHERED,
    ),
    Column(
        'accelerate, mixed_precision="bf16"',
        (f"{_WITH_ACCELERATE}::test_bf16_of_accelerate_trains_every_weight_as_autocast_does",),
        known="It is autocast around the model's forward.",
    ),
    Column(
        'accelerate, mixed_precision="fp8"',
        always=(
            f"{_WITH_ACCELERATE}::test_fp8_of_accelerate_is_an_error_that_says_what_to_set",
            f"{_WITH_ACCELERATE}::test_the_callback_refuses_fp8_when_the_trainer_is_made",
        ),
        answer="no: `TypeError`",
        known='It would convert the model with another library. Use `"bf16"`. `Float8Callback` raises `ValueError`.',
    ),
    Column(
        "DeepSpeed ZeRO-1 and ZeRO-2",
        (f"{_ZERO}::test_every_weight_moves_and_the_losses_are_those_of_ddp",),
        known="The engine sees plain parameters.",
    ),
    Column(
        "DeepSpeed ZeRO-3",
        always=(f"{_ZERO}::test_stage_three_is_an_error_before_the_training",),
        answer="no: `ValueError`",
        known="Its weights are empty between the calls of a layer. Use ZeRO-1, ZeRO-2 or FSDP2.",
    ),
    Column(
        "TRL, SFTTrainer",
        ("tests/clients/test_trl.py::test_supervised_fine_tuning_moves_every_weight",),
        known="It is a Trainer with another loss.",
    ),
    Column(
        "TRL, DPOTrainer and GRPOTrainer",
        ("tests/clients/test_trl.py::test_a_policy_and_its_reference",),
        known="Their reference model stays in high precision until you convert it.",
    ),
    Column("LoRA of peft on a converted base", ("tests/clients/test_peft.py::test_adapters_train_and_the_base_stays",)),
    Column(
        "diffusion transformers of diffusers",
        ("tests/clients/models/test_diffusion.py::test_layers_run_in_both_precisions",),
        known="In autocast, and with bfloat16 weights. Conditioning layers stay in high precision.",
    ),
    Column(
        "vision transformers, 197 tokens an image",
        ("tests/clients/models/test_vision.py::test_every_layer_runs_and_every_weight_moves",),
    ),
    Column(
        "Lightning's Trainer",
        (f"{_LIGHTNING}::test_the_trainer_trains_as_after_convert",),
        fixed={"blockwise": f"{_LIGHTNING}::test_the_trainer_converts_in_other_precisions"},
        known="The plugin calls `convert`.",
    ),
    Column(
        "Lightning's Trainer with FSDP2, FP8 all-gather",
        (f"{_LIGHTNING}::test_the_trainer_with_fsdp2_has_the_same_losses_with_and_without_the_gather",),
        fixed={"blockwise": f"{_LIGHTNING}::test_a_trainer_with_fsdp2_resumes_to_the_same_losses"},
        known=_NOT_GATHERED,
    ),
    Column(
        "Fabric with FSDP2, FP8 all-gather",
        (f"{_LIGHTNING}::test_fabric_with_fsdp2_has_the_same_losses_with_and_without_the_gather",),
        known=_NOT_GATHERED,
    ),
    Column("torchtitan, FSDP2", (_TITAN,), "fsdp", known=_NOT_GATHERED),
    Column("torchtitan's Trainer with FSDP2, checkpoints, losses in chunks", (_TITAN_TRAINER,), known=_SAME_CODE),
    Column(
        "Trainer with FSDP2, gradient accumulation, no resharding",
        (f"{_TRAINER}::test_trainer",),
        "accumulated",
        known=_SAME_CODE,
    ),
    Column("torchtitan, TP", (_TITAN,), "tp", known=_NOT_GATHERED),
    Column("torchtitan, HSDP", (_TITAN,), "hsdp", fixed={"rowwise": f"{_TITAN}[hsdp]"}, known=_NOT_GATHERED),
    Column(
        "torchtitan, torch.compile",
        (_TITAN,),
        "compiled",
        fixed={"rowwise": f"{_TITAN}[fsdp_compiled]"},
        known=_NOT_GATHERED,
    ),
)
