"""Products whose K is split: parts are added up in their order, wherever and whenever they are computed."""

import math

import pytest
import torch
from cases import each_device, normal
from matmul_cases import EPILOGUES, PAIRS, Product, family, runs

from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close
from tritonfp8.tuning import chooser


def split_configs(family):
    return [config for config in chooser.space(family, "precise") if config.split_k > 1]


@each_device
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
def test_a_split_sum_always_has_the_same_bits(device, name):
    """Parts are added up in their order, whichever program ends first."""
    pair = PAIRS[name]
    shape, repeats = ((17, 130, 700), 2) if device == "cpu" else ((64, 4096, 7168), 100)
    product = Product.of(normal, pair, shape, device)
    configs = [config for config in split_configs(family(pair)) if runs(config, pair, device)]
    assert configs
    for config in configs[:1] if device == "cpu" else configs:
        first = product.run(config=config)
        assert_matmul_close(first, product.expected(), torch.float32)
        for _ in range(repeats):
            assert_bitwise_equal(product.run(config=config), first)


@each_device
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
def test_the_epilogue_of_a_split_sum(device, name):
    """It comes once, after the parts are added up, and in any output dtype."""
    pair = PAIRS[name]
    m, n, k = (9, 140, 520) if device == "cpu" else (200, 1000, 4096)
    product = Product.of(normal, pair, (m, n, k), device)
    config = next(config for config in split_configs(family(pair)) if runs(config, pair, device))
    for epilogue in EPILOGUES:
        product.check_epilogue(epilogue, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
def test_split_sums_in_a_cuda_graph(name):
    """Each replay gives the bits of the launch, also where another product ran in between."""
    pair = PAIRS[name]
    product, other = (Product.of(normal, pair, (m, 4096, 4096), "cuda") for m in (16, 48))
    for config in split_configs(family(pair)):
        if not runs(config, pair, "cuda", out_dtype=torch.bfloat16):
            continue
        eager = product.run(out_dtype=torch.bfloat16, config=config)
        product.launch(config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product.launch(config=config)
        for _ in range(20):
            captured.fill_(math.nan)
            graph.replay()
            other.run(out_dtype=torch.bfloat16, config=config)
            assert_bitwise_equal(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
def test_split_sums_on_several_streams_at_once(name):
    """Parts of one launch never meet parts of another."""
    pair = PAIRS[name]
    product = Product.of(normal, pair, (64, 4096, 7168), "cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    for config in split_configs(family(pair)):
        if not runs(config, pair, "cuda", out_dtype=torch.bfloat16):
            continue
        alone = product.run(out_dtype=torch.bfloat16, config=config)
        torch.cuda.synchronize()
        results = []
        for _ in range(25):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(product.launch(config=config))
        torch.cuda.synchronize()
        for result in results:
            assert_bitwise_equal(result, alone)
