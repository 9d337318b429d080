"""Gathering tensors of different sizes, over two processes on the CPU."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from generators import deep_gemm

helpers = deep_gemm.utils.dist


def _gather(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = 10 * rank + torch.arange(6.0).view(2, 3)
    rows, columns = x[: 2 * rank], x[:, : 3 - rank]
    gathered = [helpers.uneven_all_gather(rows), helpers.uneven_all_gather(columns, dim=-1)]
    results.put((rank, [t.tolist() for t in gathered]))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_uneven_all_gather(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    store = tmp_path / "store"
    workers = [context.Process(target=_gather, args=(rank, store, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    gathered = dict(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    rows = [[10.0, 11.0, 12.0], [13.0, 14.0, 15.0]]
    columns = [[0.0, 1.0, 2.0, 10.0, 11.0], [3.0, 4.0, 5.0, 13.0, 14.0]]
    assert gathered == {rank: [rows, columns] for rank in range(2)}


def test_bad_use():
    with pytest.raises(ValueError, match="local_rank must be in 0..1, got 2"):
        helpers.init_dist(2, 2)
    with pytest.raises(RuntimeError, match="needs init_dist first"):
        helpers.dist_print("x")
