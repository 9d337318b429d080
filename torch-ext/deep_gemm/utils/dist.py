"""Process-group helpers for programs that run one process on each GPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

__all__ = ["dist_print", "init_dist", "uneven_all_gather"]

_local_rank = None


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Join the NCCL process group of all GPUs on all nodes, and make GPU `local_rank` the default device.

    Environment: MASTER_ADDR (127.0.0.1), MASTER_PORT (8361), WORLD_SIZE, the number of nodes (1), and RANK, that of
    this node (0). Returns (rank, world_size, group) with rank = node * num_local_ranks + local_rank.
    Raises ValueError for a local_rank outside 0..num_local_ranks - 1.
    """
    global _local_rank
    if not 0 <= local_rank < num_local_ranks:
        raise ValueError(f"local_rank must be in 0..{num_local_ranks - 1}, got {local_rank}")
    address = os.getenv("MASTER_ADDR", "127.0.0.1")
    port = os.getenv("MASTER_PORT", "8361")
    num_nodes = int(os.getenv("WORLD_SIZE", "1"))
    node = int(os.getenv("RANK", "0"))

    torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend="nccl",
        init_method=f"tcp://{address}:{port}",
        world_size=num_nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank),
    )
    torch.set_default_device("cuda")
    _local_rank = local_rank
    world_size = dist.get_world_size()
    return dist.get_rank(), world_size, dist.new_group(list(range(world_size)))


def uneven_all_gather(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather tensors whose sizes differ along `dim` from all ranks, concatenated along `dim` in rank order.

    All other sizes, and the dtype, must be the same on every rank. A collective: every rank of `group` (default: all)
    calls it and gets the same result. Sizes are exchanged through the host.
    """
    world_size = dist.get_world_size(group)
    size = torch.tensor([tensor.shape[dim]], dtype=torch.int64, device=tensor.device)
    sizes = [torch.empty_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    sizes = [int(s) for s in sizes]

    shape = list(tensor.shape)
    shape[dim] = max(sizes)
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([t.narrow(dim, 0, s) for t, s in zip(gathered, sizes)], dim=dim)


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print `s` on every rank, or on local rank 0 of each node if `once_in_node`, then wait for all ranks.

    Raises RuntimeError before `init_dist`.
    """
    if _local_rank is None:
        raise RuntimeError("dist_print needs init_dist first")
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()
