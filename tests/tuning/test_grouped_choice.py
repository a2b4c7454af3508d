"""Which configuration a GEMM of groups is launched with."""

import dataclasses
import json

import pytest
from tuned import ADA, H200, MACHINE, entry

from tritonfp8.tuning import chooser, grouped_tiles, store
from tritonfp8.tuning.grouped_tiles import GroupedGemm
from tritonfp8.tuning.kinds import find, space

OUTPUT = GroupedGemm("epilogue", "precise", (1, 1), 128, 128 * 1000, (1536, 2048), False, 2)
GRAD_WEIGHT = OUTPUT._replace(sums_tokens=True)
BLOCKWISE = OUTPUT._replace(family="blockwise", rows=(1, 128))
FAST, MX = OUTPUT._replace(accumulation="fast"), OUTPUT._replace(family="mx")
EVERY_COLUMN = BLOCKWISE._replace(rows=(1, 1), sums_tokens=True)
ALL = (OUTPUT, GRAD_WEIGHT, BLOCKWISE, EVERY_COLUMN, FAST, MX, OUTPUT._replace(out_itemsize=4))
each = pytest.mark.parametrize("gemm", ALL, ids=str)
# Fields of the tile by the tokens of a group.
TILES = [
    *((gemm, ["block_m"], {32: [64], 33: [128]}) for gemm in (OUTPUT, BLOCKWISE, FAST, MX)),
    *((gemm, ["block_m", "block_n"], {255: [128, 128], 256: [128, 256]}) for gemm in (OUTPUT, BLOCKWISE, FAST)),
    # Sums of a medium length take narrow tiles.
    (GRAD_WEIGHT, ["block_n"], {511: [256], 512: [128], 2047: [128], 2048: [256]}),
]


pytestmark = pytest.mark.usefixtures("own_tables")


def choose(gemm, device=H200, copy_engine=True):
    return chooser.choose_grouped(gemm, device, copy_engine and device.has_tma)


def last(gemm):
    return grouped_tiles.candidates(gemm, H200, True)[-1].name


@each
def test_a_name_is_one_configuration_of_its_kind(gemm):
    kind = chooser.grouped_key(gemm, True).kind
    names = [config.name for config in space(kind)]
    assert len(set(names)) == len(names) > 1
    assert [find(kind, name).name for name in names] == names


@each
@pytest.mark.parametrize("device", [H200, ADA], ids=lambda device: device.name)
def test_what_is_chosen_can_run(gemm, device):
    chosen = choose(gemm, device)
    assert grouped_tiles.serves(chosen, gemm, device, device.has_warpgroup_mma)
    assert chosen.specialized == (device is H200 and gemm.family != "mx")
    assert not choose(gemm, copy_engine=False).specialized


@pytest.mark.parametrize(("gemm", "fields", "expected"), TILES, ids=str)
def test_tiles_are_as_large_as_the_tokens_of_a_group_are_many(gemm, fields, expected):
    chosen = {tokens: choose(gemm._replace(tokens=gemm.groups * tokens)) for tokens in expected}
    assert {tokens: [getattr(config, name) for name in fields] for tokens, config in chosen.items()} == expected


def test_scales_of_every_column_take_tall_tiles():
    assert choose(EVERY_COLUMN).block_m == 256


def test_outputs_of_four_bytes_are_stored_in_halves():
    narrow, wide = (choose(OUTPUT._replace(out_itemsize=itemsize)) for itemsize in (2, 4))
    assert (narrow.halves, wide.halves) == (False, True)
    assert wide == dataclasses.replace(narrow, halves=True)


def test_a_device_without_shared_memory_is_told():
    with pytest.raises(RuntimeError, match="has 1000 bytes of shared memory a block"):
        choose(OUTPUT, dataclasses.replace(H200, max_shared_bytes=1000))


@pytest.mark.parametrize("changes", [{"groups": 0}, {"tokens": 0}, {"sizes": (0, 2048)}], ids=str)
def test_sizes_of_zero(changes):
    assert choose(OUTPUT._replace(**changes)).specialized


class TestTuned:
    @each
    def test_the_tuned_one_is_chosen(self, gemm):
        assert choose(gemm).name != last(gemm)
        chooser.install({chooser.grouped_key(gemm, True): entry(last(gemm))}, MACHINE)
        assert choose(gemm).name == last(gemm)

    @pytest.mark.parametrize(
        ("changes", "is_near"),
        [
            # 1,000 tokens a group, whose bucket is 1,024.
            ({"tokens": 128 * 1024}, True), ({"tokens": 128 * 4096}, True), ({"tokens": 128 * 8192}, False),
            # Of a rank of expert parallelism.
            ({"groups": 64, "tokens": 64 * 1000}, True), ({"groups": 32, "tokens": 32 * 1000}, False),
            ({"sizes": (1024, 2048)}, True), ({"sizes": (2048, 768)}, False), ({"sums_tokens": True}, False),
            ({"out_itemsize": 4}, False), ({"accumulation": "fast"}, False),
        ],
        ids=str,
    )  # fmt: skip
    def test_it_serves_what_is_near(self, changes, is_near):
        chooser.install({chooser.grouped_key(OUTPUT, True): entry(last(OUTPUT))}, MACHINE)
        assert (choose(OUTPUT._replace(**changes)).name == last(OUTPUT)) == is_near

    def test_scales_of_rows_and_of_tensors_are_one_kind(self):
        chooser.install({chooser.grouped_key(OUTPUT, True): entry(last(OUTPUT))}, MACHINE)
        assert choose(OUTPUT._replace(rows=(-1, -1))).name == last(OUTPUT)

    def test_a_file_holds_it(self):
        entries = {chooser.grouped_key(gemm, True): entry(last(gemm)) for gemm in ALL}
        data = store.dump(entries, MACHINE)
        assert store.parse(data, MACHINE) == (entries, 0)
        rows = json.loads(data)["entries"]
        assert {row["groups"] for row in rows} == {"rows", "columns"}
        assert {row["experts"] for row in rows} == {128}

    @pytest.mark.parametrize("changes", [{"experts": 0}, {"groups": "single"}, {"groups": "x"}, {"experts": "8"}])
    def test_other_rows_are_malformed(self, changes):
        at = chooser.grouped_key(OUTPUT, True)
        document = json.loads(store.dump({at: entry(last(OUTPUT))}, MACHINE))
        document["entries"][0] |= changes
        entries, unusable = store.parse(json.dumps(document).encode(), MACHINE)
        assert unusable == 1
        assert at not in entries
