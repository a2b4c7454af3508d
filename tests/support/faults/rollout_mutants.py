"""The faults about weights that go into an engine, as arguments of ``Mutant``."""

_SHARDS = ("tests/rollout/test_receiver.py", "-k", "shard")
_ROWS = ("tests/rollout/test_receiver.py", "-k", "every_row")
_WRONG = ("tests/rollout/test_wrong_streams.py",)
_TRANSFER = ("tests/rollout/test_transfer.py",)

FAULTS = (
    (
        "tritonfp8/rollout/names.py",
        '(".q_proj.", ".k_proj.", ".v_proj."), repeated=True',
        '(".q_proj.", ".v_proj.", ".k_proj."), repeated=True',
        "keys lie where an engine reads values",
        _SHARDS,
    ),
    (
        "tritonfp8/rollout/shards.py",
        "shard.rank // each * length",
        "shard.rank % (shard.size // each) * length",
        "ranks that share a head of keys get the heads in turn",
        _ROWS,
    ),
    (
        "tritonfp8/rollout/shards.py",
        "box.append((start // block, -(-length // block)))",
        "box.append((0, -(-length // block)))",
        "each rank gets the scales of the first one",
        _SHARDS,
    ),
    (
        "tritonfp8/rollout/shards.py",
        "if start % block or to % block or",
        "if",
        "a block that two ranks share is taken for a block of one of them",
        _WRONG,
    ),
    (
        "tritonfp8/rollout/shards.py",
        "    if row is None:\n        return []\n",
        "    if row is None:\n        row = _COLUMNS\n",
        "each rank gets some rows of a tensor that a checkpoint has joined",
        ("tests/rollout/test_receiver.py", "-k", "rows_are_shared"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "writes.append((into, _bytes(x).reshape(into.shape).to(into.dtype)))",
        "writes.append((into, x.reshape(into.shape).to(into.dtype)))",
        "codes are copied as values, and rounded to numbers",
        _SHARDS,
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "attempt(lambda: self._checked(taken()))",
        "attempt(lambda: (self._checked([each])[0] for each in taken()))",
        "the first tensors are written before the last scale is checked",
        (*_WRONG, "-k", "error"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "            settle(group, error)\n            return _write(writes or ())",
        "            settle(group, error)\n        return _write(writes or ())",
        "Ctrl-C leaves some weights of an engine old and some new",
        (*_WRONG, "-k", "ctrl_c"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "        with uninterrupted():\n            settle(group, error)\n            return",
        "        settle(group, error)\n        with uninterrupted():\n            return",
        "Ctrl-C leaves one rank of an engine old and another one new",
        (*_TRANSFER, "-k", "ctrl_c"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "            settle(group, error)\n            return _write(writes or ())\n",
        "            total = _write(writes or ())\n            settle(group, error)\n            return total\n",
        "a rank of an engine writes what another one refuses",
        (*_TRANSFER, "-k", "error_of_one"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "plan, error = attempt(planned)\n        settle(group, error)\n",
        "plan, error = attempt(planned)\n        settle(None, error)\n",
        "ranks that gather a stream wait for one that refused its names",
        (*_TRANSFER, "-k", "train_and_generate"),
    ),
    (
        "tritonfp8/rollout/receiver.py",
        "part if part.shape == x.shape else part.clone()",
        "part",
        "a rank keeps the tensors of all ranks until the stream ends",
        ("tests/rollout/test_receiver.py", "-k", "keeps"),
    ),
    (
        "tritonfp8/rollout/transfer.py",
        "            self._advance(-self._filled % _ALIGNED)\n",
        "",
        "what follows a tensor of an odd size is read at another place than it was sent to",
        (*_TRANSFER, "-k", "odd"),
    ),
    (
        "tritonfp8/rollout/transfer.py",
        "    for outbox in outboxes:\n        outbox.finish()\n    settle",
        "    settle",
        "the ranks of an engine wait for buckets of a stream that broke off",
        (*_TRANSFER, "-k", "error_of_one"),
    ),
    (
        "tritonfp8/export/stream.py",
        ' or Stored("", x.dtype, tuple(x.shape)) != header:',
        ":",
        "a tensor of another shape than the headers announce is sent",
        (*_WRONG, "-k", "announced"),
    ),
)
