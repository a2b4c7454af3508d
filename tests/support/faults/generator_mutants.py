"""The faults about a generator that shares the codes of a trainer, as arguments of ``Mutant``."""

_GENERATOR, _CHECK, _SHARDED = (f"tests/rollout/test_{name}.py" for name in ("generator", "check", "sharded"))

FAULTS = (
    (
        "tritonfp8/rollout/sharing.py",
        "            changes |= cell.cell_contents is not before.cell_contents",
        "            changes |= False",
        "a forward that other programs wrapped runs the trainer's modules in a generator",
        ("tests/rollout/test_replaced_forwards.py", "-k", "calls_the_one_it_replaced"),
    ),
    (
        "tritonfp8/rollout/generator.py",
        "if names := self.changed():",
        "if names := []:",
        "a generator mixes norms of this step with codes of the last",
        (_GENERATOR, "-k", "stale"),
    ),
    (
        "tritonfp8/rollout/generator.py",
        "        with uninterrupted():\n            for each",
        "        if True:\n            for each",
        "Ctrl-C in a refresh leaves some weights old and some new",
        (_GENERATOR, "-k", "ctrl_c"),
    ),
    (
        "tritonfp8/rollout/generator.py",
        "found = list(read_all([each for each in self.own if not each.is_cast_in_place], self.autocast))",
        "found = read_all([each for each in self.own if not each.is_cast_in_place], self.autocast)",
        "weights are written before all of them were read",
        (_GENERATOR, "-k", "ctrl_c"),
    ),
    (
        "tritonfp8/rollout/scoring.py",
        "found.insert(0, first)",
        "found.append(first)",
        "log-probs are of what top-k and penalties leave",
        (_GENERATOR, "-k", "changes_the_choice"),
    ),
    (
        "tritonfp8/rollout/generator.py",
        "ends.cumsum(1) - ends == 0",
        "ends.cumsum(1) == 0",
        "an end of sequence has no log-prob",
        (_GENERATOR, "-k", "end_of_sequence"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        "weight.detach() if dtype is None else weight.detach().to(dtype)",
        "weight.detach()",
        "float32 weights are quantized without the rounding of autocast",
        (_GENERATOR, "-k", "float32_weights"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        "if not self.tensor.is_meta and self.tensor is not self.parameter:",
        "if False:",
        "a refresh puts codes at other addresses",
        (_GENERATOR, "-k", "after_each_step"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        "            return stored_as_layer(layer, key, values, spec)",
        "            once = stored_as_layer(layer, key, values, spec).dequantize()\n"
        "            return stored_as_layer(layer, key, once, spec)",
        "weights are quantized twice",
        (_GENERATOR, "-k", "after_each_step"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        '("__composable_api", "_is_fsdp_managed", "_fsdp_")',
        '("__composable_api", "_fsdp_")',
        "ranks wait for each other at every token that one of them generates",
        (_SHARDED, "-k", "refresh_gathers"),
    ),
    (
        "tritonfp8/rollout/scoring.py",
        "out.logits[:, -new - 1 : -1]",
        "out.logits[:, -new:]",
        "the trainer scores each token by what it makes likely",
        (_GENERATOR, "-k", "log_probs_are"),
    ),
    (
        "tritonfp8/rollout/checking.py",
        "torch.cat(columns, 1)[:, :-1]",
        "torch.cat(columns, 1)",
        "check compares a token with the one before it",
        (_CHECK, "-k", "planted"),
    ),
    (
        "tritonfp8/rollout/checking.py",
        "return all(torch.equal(x",
        "return True or all(torch.equal(x",
        "check passes over codes that the trainer does not make",
        (_CHECK, "-k", "planted or same_values"),
    ),
    (
        "tritonfp8/rollout/checking.py",
        'if side == "output":',
        'if side != "":',
        "check blames a module for the input that another one gave it",
        (_CHECK, "-k", "difference_between"),
    ),
    (
        "tritonfp8/rollout/checking.py",
        "if found != 0 or any(each.gathers is not None for each in rollout.own):",
        "if found != 0:",
        "a rank that finds a difference waits for the others",
        (_SHARDED, "-k", "one_rank"),
    ),
)
