"""Names of configurations, the cost model, and which configuration a product is launched with."""

import dataclasses
import itertools
import math

import hypothesis
import pytest
import triton
from hypothesis import strategies as st
from tuned import ADA, H200, MACHINE, PLAIN, ROWWISE, SMALL, WIDE, entry, fastest, key

from tritonfp8.compat import hardware
from tritonfp8.launch import executor
from tritonfp8.tuning import chooser as tuning
from tritonfp8.tuning import store
from tritonfp8.tuning.kinds import find
from tritonfp8.tuning.matmul_space import SMALL_M, SPACES, MatmulConfig, predicted_time, space, supports

SPACE_NAMES = [(family, accumulation) for family, spaces in SPACES.items() for accumulation in spaces]
SIZES = (1, 16, 129, 1024, 4096, 14336, 16384)


pytestmark = pytest.mark.usefixtures("own_tables")


def choose(m, n, k, device=H200, *, family="epilogue", accumulation="precise", rows=(1, 1), out_itemsize=2, bare=True):
    copy_engine = device.has_tma
    return tuning.choose(family, accumulation, rows, m, n, k, out_itemsize, bare, copy_engine, device)


class TestNames:
    @pytest.mark.parametrize(("family", "accumulation"), SPACE_NAMES)
    def test_a_name_is_one_configuration(self, family, accumulation):
        configs = SPACES[family][accumulation]
        assert len({config.name for config in configs}) == len(configs)
        for config in configs:
            assert find(ROWWISE._replace(family=family, accumulation=accumulation), config.name) is config

    def test_names_are_what_files_hold(self):
        """A changed name orphans what users have tuned."""
        assert MatmulConfig(256, 128, 128, 4, 4, specialized=True, bare=True).name == "256x128x128-w4-s4-specialized"
        assert MatmulConfig(64, 64, 128, 4, 3).name == SMALL
        assert MatmulConfig(128, 256, 64, 8, 3, halves=True, flatten=True).name == "128x256x64-w8-s3-halves-flatten"
        assert MatmulConfig(64, 32, 256, 4, 5, group_m=4, blocks_per_sm=2).name == "64x32x256-w4-s5-g4-b2"

    @pytest.mark.parametrize(
        ("name", "fields"),
        [("x", {}), (WIDE, {"family": "no"}), (WIDE, {"family": "mx"}), (WIDE, {"groups": "no"})],
        ids=str,
    )
    def test_nothing_else_is_found(self, name, fields):
        assert find(ROWWISE._replace(**fields), name) is None

    def test_one_space_serves_families_that_are_always_promoted(self):
        assert space("blockwise", "fast") is space("blockwise", "precise")
        assert space("epilogue", "fast") is not space("epilogue", "precise")


class TestCostModel:
    @pytest.mark.parametrize("out_itemsize", [2, 4])
    def test_full_waves_run_at_the_rate(self, out_itemsize):
        config = SPACES["epilogue"]["precise"][0]
        m, n, k = 132 * config.block_m, config.block_n, 8192
        flops = 2 * m * n * k / (config.rate * 1e15)
        copied = ((m + n) * k + out_itemsize * m * n) / 4.27e12
        assert predicted_time(config, m, n, k, out_itemsize, 132) == pytest.approx(flops + copied)

    @pytest.mark.parametrize(("family", "accumulation"), SPACE_NAMES)
    @pytest.mark.parametrize("k", [0, 1, 128, 7168])
    def test_the_order_is_that_of_the_waves(self, family, accumulation, k):
        def time_of_waves(config, m, n, num_sms):
            tiles = math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
            waves = -(-tiles // (num_sms * config.blocks_per_sm))
            ends = 1 if config.pingpong else waves
            paid_k = waves * max(k, 1) + ends * config.idle_steps * config.block_k
            return config.blocks_per_sm * config.block_m * config.block_n * paid_k / config.rate

        # Of few rows, how they are read counts as well.
        for m, n, device in itertools.product([m for m in SIZES if m > SMALL_M], SIZES, (H200, ADA)):
            product = tuning.kind(family, accumulation, (1, 1), 2, True, device.has_tma)
            ordered = tuning.candidates(product, m, n, k, device)
            expected = [config for config in SPACES[family][accumulation] if config in ordered]
            assert ordered == sorted(expected, key=lambda c: time_of_waves(c, m, n, device.num_sms))


def test_buckets_are_half_octaves():
    assert [tuning.bucket(m) for m in (1, 9, 16, 17, 24, 25, 33, 49, 4096, 4097, 6145)] == [
        8, 12, 16, 24, 24, 32, 48, 64, 4096, 6144, 8192,
    ]  # fmt: skip
    for m in range(1, 3000):
        assert m <= tuning.bucket(m) <= max(8, 1.5 * m)
        assert tuning.bucket(tuning.bucket(m)) == tuning.bucket(m)


class TestChoice:
    def test_without_entries_the_cost_model_decides(self):
        assert choose(8192, 8192, 512).name == fastest(512) != WIDE
        assert choose(8192, 8192, 8192).name == WIDE

    def test_tiles_in_turn_are_chosen_where_their_ends_are_hidden(self):
        """Where K is small, and a program has several tiles; no epilogue needs the registers."""

        def pingpong(m, n, k, **fields):
            return choose(m, n, k, accumulation="fast", **fields).pingpong

        assert pingpong(8192, 8192, 1024)
        assert not pingpong(8192, 8192, 8192)
        assert not pingpong(1024, 1024, 1024)
        assert not pingpong(8192, 8192, 1024, bare=False)

    def test_the_tuned_product_itself(self):
        tuning.install({key(): entry(SMALL), key(m=6144): entry(PLAIN)}, MACHINE)
        assert choose(4096, 4096, 4096).name == SMALL
        assert choose(4000, 4096, 4096).name == SMALL
        assert choose(4097, 4096, 4096).name == PLAIN

    def test_the_nearest_m_before_nearer_sizes(self):
        tuning.install({key(m=4096): entry(SMALL), key(m=16384, n=4097): entry(PLAIN)}, MACHINE)
        assert choose(16384, 4096, 4096).name == SMALL
        tuning.install({key(m=8192): entry(PLAIN)}, MACHINE)
        assert choose(16384, 4096, 4096).name == PLAIN

    def test_the_nearest_sizes(self):
        tuning.install({key(n=5000): entry(SMALL), key(n=6000): entry(PLAIN)}, MACHINE)
        assert choose(4096, 5400, 4096).name == SMALL
        assert choose(4096, 5600, 4096).name == PLAIN

    @pytest.mark.parametrize("mnk", [(32768, 4096, 4096), (512, 4096, 4096), (4096, 5793, 4096), (4096, 4096, 2896)])
    def test_too_far_is_a_miss(self, mnk):
        m, n, k = mnk
        before = choose(m, n, k)
        assert before.name != SMALL
        tuning.install({key(): entry(SMALL)}, MACHINE)
        assert choose(m, n, k) is before
        assert choose(4096, 5792, 4096).name == choose(1024, 4096, 4096).name == SMALL

    @pytest.mark.parametrize(
        "other",
        [
            {"accumulation": "fast"}, {"family": "mx"}, {"out_itemsize": 4}, {"bare": False}, {"copy_engine": False},
            {"a_rows": 1, "b_rows": 128, "family": "blockwise"},
        ],
    )  # fmt: skip
    def test_another_kind_of_product_says_nothing(self, other):
        before = choose(4096, 4096, 4096)
        tuning.install({key(**other): entry(SMALL)}, MACHINE)
        assert choose(4096, 4096, 4096) is before

    def test_operands_scaled_along_k_are_kinds_of_their_own(self):
        kind = tuning.kind("blockwise", "fast", (1, 128), 2, True, True)
        tuning.install({key(kind=kind): entry(SMALL)}, MACHINE)
        assert choose(4096, 4096, 4096, family="blockwise", rows=(1, 128), accumulation="fast").name == SMALL
        assert choose(4096, 4096, 4096, family="blockwise", rows=(1, 1)).name != SMALL

    def test_rowwise_and_tensorwise_are_one_kind(self):
        assert tuning.kind("epilogue", "fast", (-1, 1), 2, True, True) == ROWWISE._replace(accumulation="fast")

    @pytest.mark.parametrize("name", ["no such name", "128x256x128-w8-s4-halves"])
    def test_a_name_of_no_candidate_is_a_miss(self, name):
        """The second is of the space of fast accumulation."""
        before = choose(4096, 4096, 4096)
        tuning.install({key(): entry(name), key(m=8192): entry(SMALL)}, MACHINE)
        assert choose(4096, 4096, 4096).name == SMALL
        assert choose(4096, 14336, 4096) is before

    def test_what_cannot_run_is_not_chosen(self):
        """An entry says bare, the product is; the device has no warpgroup MMA."""
        machine = hardware.machine_key(ADA)
        tuning.install({key(copy_engine=False): entry(fastest(4 * 8192))}, machine)
        assert not choose(4096, 4096, 4096, ADA).specialized

    def test_too_little_shared_memory_is_an_error(self):
        with pytest.raises(RuntimeError, match="1000 bytes of shared memory"):
            choose(64, 64, 64, dataclasses.replace(H200, max_shared_bytes=1000))

    def test_empty_contraction(self):
        tuning.install({key(): entry(SMALL)}, MACHINE)
        assert choose(4096, 4096, 0).name == fastest(1)

    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=60)
    def test_any_entries_any_product(self, data):
        """The choice can run the product, and does not depend on the order of the entries."""
        family, accumulation = data.draw(st.sampled_from(SPACE_NAMES))
        names = [config.name for spaces in SPACES.values() for configs in spaces.values() for config in configs]
        device = data.draw(st.sampled_from([H200, ADA]))
        bare, out_itemsize = data.draw(st.booleans()), data.draw(st.sampled_from([2, 4]))
        kind = tuning.kind(family, accumulation, (1, 1), out_itemsize, bare, device.has_tma)
        size = st.sampled_from([64, 100, 128, 192, 256])
        keys = st.builds(lambda n, k, m: key(n, k, tuning.bucket(m), kind), size, size, size)
        items = data.draw(st.lists(st.tuples(keys, st.sampled_from(names).map(entry)), unique_by=lambda item: item[0]))
        m, n, k = (data.draw(size) for _ in "mnk")
        chosen = []
        for entries in (items, items[::-1]):
            tuning.reload()
            tuning._tables[hardware.machine_key(device)] = tuning._by_kind(dict(entries))
            fields = {"family": family, "accumulation": accumulation, "out_itemsize": out_itemsize, "bare": bare}
            chosen.append(choose(m, n, k, device, **fields))
        assert chosen[0] is chosen[1]
        assert chosen[0] in space(family, accumulation)
        specialized = device.has_tma and device.has_warpgroup_mma
        assert supports(chosen[0], family, out_itemsize, bare, specialized, device.max_shared_bytes)


@pytest.mark.parametrize(("version", "is_taken"), [("3.6.0", True), ("3.8.1", True), ("3.9.0", False)])
def test_a_tuned_configuration_for_which_triton_finds_no_registers_is_left_out(monkeypatch, version, is_taken):
    config = max(space("epilogue", "precise"), key=lambda config: config.overlap)
    tuning.install({key(8192, 8192, 8192): entry(config.name)}, MACHINE)
    monkeypatch.setattr(triton, "__version__", version)
    assert (choose(8192, 8192, 8192) is config) == is_taken


class TestFiles:
    @pytest.fixture(autouse=True)
    def _files(self, own_tables, monkeypatch):
        tuning._tables.clear()
        self.shipped, self.user, self.reads = {}, {}, []

        def read(name):
            def reader(machine):
                self.reads.append((name, machine))
                return getattr(self, name)

            return reader

        monkeypatch.setattr(store, "read_shipped", read("shipped"))
        monkeypatch.setattr(store, "read_user", read("user"))

    def test_the_user_before_the_package(self):
        self.shipped = {key(): entry(SMALL), key(m=8192): entry(SMALL)}
        self.user = {key(): entry(PLAIN)}
        assert choose(4096, 4096, 4096).name == PLAIN
        # Nearer, whoever tuned it.
        assert choose(8192, 4096, 4096).name == SMALL

    def test_they_are_read_once_until_they_are_to_be_read_again(self):
        for m in (4096, 4096, 64, 128):
            choose(m, 4096, 4096)
        self.user = {key(): entry(SMALL)}
        assert choose(4096, 4096, 4096).name == WIDE
        tuning.install({key(n=64): entry(SMALL)}, MACHINE)
        assert choose(4096, 4096, 4096).name == WIDE
        assert self.reads == [("shipped", MACHINE), ("user", MACHINE)]
        tuning.reload()
        assert choose(4096, 4096, 4096).name == SMALL

    @pytest.mark.parametrize("change", [tuning.reload, lambda: tuning.install({key(): entry(SMALL)}, MACHINE)])
    def test_launches_are_not_repeated_with_an_earlier_choice(self, monkeypatch, change):
        monkeypatch.setattr(executor, "_plans", {"launched": None})
        change()
        assert not executor._plans


def test_machine_keys():
    assert hardware.machine_key(H200) == MACHINE
    assert hardware.machine_key(hardware.CPU) == "cpu-4"
    odd = dataclasses.replace(H200, name="../NVIDIA (A) " + "x" * 300)
    assert hardware.machine_key(odd).startswith("nvidia-a-x")
    assert len(hardware.machine_key(odd)) < 100
    sliced = dataclasses.replace(H200, num_sms=60)
    assert hardware.machine_key(sliced) != MACHINE
