"""Kernels that count every query or weigh tokens, in Triton's interpreter."""

import pytest
import torch

from tests.every_query_cases import check_column_sums, check_weighted
from tests.nightly import nightly
from vllm_kvevict.ops.token_format import INT4, INT8

CHECKS = pytest.mark.parametrize("check", [check_column_sums, check_weighted])


@CHECKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_types(check, dtype):
    check("cpu", dtype, seed=1)


@CHECKS
@pytest.mark.parametrize("seed", [2, nightly(3), nightly(4)])
def test_softcap_sinks_and_several_tiles_of_queries(check, seed):
    # 3 query heads and up to 60 queries: tiles of 32 rows end inside a query.
    check("cpu", torch.float32, group=3, most=60, softcap=5.0, sinks=True, seed=seed)


@CHECKS
def test_an_fp8_cache(check):
    check("cpu", torch.float16, fp8=True, seed=5)


@CHECKS
@pytest.mark.parametrize("stored", [INT4, nightly(INT8)], ids=["int4", "int8"])
def test_stores_in_few_bits(check, stored):
    check("cpu", torch.float32, stored=stored, dim=64, most=20, requests=3, layers=1, seed=6)


@CHECKS
def test_single_queries_of_a_large_head(check):
    check("cpu", torch.float32, dim=96, most=1, block_size=32, layers=1, seed=7)
