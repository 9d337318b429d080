"""Speed of the MoE glue, beside a device copy of the same bytes and beside the same work as separate steps.

The separate steps are torch ops around the fused per-token cast, none of which waits for the device. Needs a CUDA GPU.
Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch

from common import copies, eager_seconds, graph_seconds, rotated, run

COPY = "device copy of the same bytes"
STEPS = "the same as separate steps"
SHARE, SPEEDUP = "share of the copy rate (graph replay)", "speedup over separate steps (graph replay)"
RECIPE = dict(use_ue8m0=False, gran_k=128)
ROUTINGS = ((2, 8), (8, 256))  # topk, experts
ALIGNMENT = 128
US = 1e6


def random_ids(tokens, topk, experts):
    return torch.rand(tokens, experts, device="cuda").topk(topk, dim=1).indices


def route_in_steps(topk_ids, experts, rows):
    """What `fused_moe_route` gives, and each sorted slot's token and row, by a sort and a histogram."""
    slots = topk_ids.flatten()
    expert, order = torch.sort(slots, stable=True)
    count = torch.histc(expert.float(), bins=experts, min=0, max=experts - 1).int()
    padded = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padding = (padded - count).cumsum(0) - (padded - count)
    row = torch.arange(len(slots), device="cuda") + padding[expert]
    row_map = torch.empty(len(slots), dtype=torch.int32, device="cuda").scatter_(0, order, row.int())
    grouped_layout = torch.full((rows,), -1, dtype=torch.int32, device="cuda").scatter_(0, row, expert.int())
    return grouped_layout, row_map.view(topk_ids.shape), order // topk_ids.shape[1], row


def gather_in_steps(kernel, x, token, row, out, out_sf):
    x_fp8, sf = kernel.fused_per_token_cast_to_fp8(x[token], **RECIPE)
    out.view(torch.uint8).index_copy_(0, row, x_fp8.view(torch.uint8))
    out_sf.index_copy_(0, row, sf)


def combine_in_steps(y, row_map, weights):
    rows = y.index_select(0, row_map.flatten()).view(*row_map.shape, -1)
    return (rows * weights.to(y.dtype)[..., None]).sum(1)


def backward_in_steps(dout, y, row_map, weights, dy):
    rows = row_map.flatten()
    dy.index_copy_(0, rows.long(), (weights[..., None] * dout[:, None]).to(dout.dtype).flatten(0, 1))
    return (y.index_select(0, rows).view(*row_map.shape, -1) * dout[:, None]).sum(-1, dtype=torch.float32)


class Routed:
    """A routing of `tokens`, with the buffers around it for each benchmark."""

    def __init__(self, kernel, tokens, topk, experts, hidden):
        self.kernel, self.tokens, self.topk, self.hidden = kernel, tokens, topk, hidden
        self.ids = random_ids(tokens, topk, experts)
        self.grouped_layout, self.row_map = kernel.fused_moe_route(self.ids, experts, ALIGNMENT)
        self.rows, self.slots = len(self.grouped_layout), tokens * topk
        steps = route_in_steps(self.ids, experts, self.rows)
        assert torch.equal(steps[0], self.grouped_layout) and torch.equal(steps[1], self.row_map)
        self.token, self.row = steps[2:]
        self.weights = torch.rand(tokens, topk, device="cuda")
        self.case = f"{tokens} x {hidden}, top {topk} of {experts}"

    def bf16(self, rows):
        return torch.randn(rows, self.hidden, dtype=torch.bfloat16, device="cuda")

    def gather(self):
        """(bytes moved, buffers, fused call, steps): each token read once and written to each of its rows."""
        sf_bytes = self.hidden // 128 * 4
        nbytes = self.tokens * self.hidden * 2 + self.slots * (self.hidden + sf_bytes + 4)

        def make():
            out = torch.empty(self.rows, self.hidden, dtype=torch.float8_e4m3fn, device="cuda")
            return self.bf16(self.tokens), out, torch.empty(self.rows, self.hidden // 128, device="cuda")

        def fused(x, out, out_sf):
            self.kernel.fused_moe_gather_cast_to_fp8(x, self.row_map, self.rows, **RECIPE, out=out, out_sf=out_sf)

        def steps(x, out, out_sf):
            gather_in_steps(self.kernel, x, self.token, self.row, out, out_sf)

        return nbytes, make, fused, steps

    def combine(self):
        nbytes = (self.slots + self.tokens) * self.hidden * 2 + self.slots * 8

        def fused(y, out):
            self.kernel.fused_moe_combine(y, self.row_map, self.weights, out)

        def steps(y, out):
            combine_in_steps(y, self.row_map, self.weights)

        return nbytes, lambda: (self.bf16(self.rows), self.bf16(self.tokens)), fused, steps

    def backward(self):
        nbytes = (2 * self.slots + self.tokens) * self.hidden * 2 + self.slots * 12
        dweights = torch.empty(self.tokens, self.topk, device="cuda")

        def fused(dout, y, dy):
            self.kernel.fused_moe_combine_backward(dout, y, self.row_map, self.weights, dy, dweights)

        def steps(dout, y, dy):
            backward_in_steps(dout, y, self.row_map, self.weights, dy)

        return nbytes, lambda: (self.bf16(self.tokens), self.bf16(self.rows), self.bf16(self.rows)), fused, steps


OPS = {"gather + cast": "gather", "combine": "combine", "combine backward": "backward"}


def copy_share(kernel, results, quick):
    sizes = [(8192, 7168)] if quick else [(tokens, hidden) for tokens in (8192, 16384) for hidden in (4096, 7168)]
    repeats = 3 if quick else 5
    for topk, experts in ROUTINGS:
        for tokens, hidden in sizes:
            routed = Routed(kernel, tokens, topk, experts, hidden)
            for name, op in OPS.items():
                nbytes, make, fused, steps = getattr(routed, op)()
                sets = rotated(make, nbytes)
                workloads = [[partial(call, *buffers) for buffers in sets] for call in (fused, steps)]
                device, device_steps, copy = graph_seconds(
                    *workloads, copies(nbytes, len(sets)), nbytes=nbytes, repeats=repeats
                )
                case = f"{name}, {routed.case}"
                bar = None if op == "backward" else "ratio >= 0.85"
                results.add(case, SHARE, nbytes / device / 1e12, "TB/s", COPY, nbytes / copy / 1e12, bar)
                results.add(case, SPEEDUP, device * US, "us", STEPS, device_steps * US)


def routing(kernel, results, quick):
    for topk, experts in ROUTINGS:
        for tokens in (1, 64, 512, 8192, 16384):
            ids = random_ids(tokens, topk, experts)
            rows = kernel.get_num_rows_for_contiguous_layout(tokens, topk, experts, ALIGNMENT)
            fused = [partial(kernel.fused_moe_route, ids, experts, ALIGNMENT)]
            steps = [partial(route_in_steps, ids, experts, rows)]
            device, device_steps = graph_seconds(fused, steps, nbytes=ids.nbytes, repeats=3 if quick else 7)
            case = f"routing, {tokens} tokens, top {topk} of {experts}"
            results.add(case, SPEEDUP, device * US, "us", STEPS, device_steps * US)


def few_tokens(kernel, results, quick):
    for tokens in (1, 64, 512):
        routed = Routed(kernel, tokens, 8, 256, 7168)
        for name, op in OPS.items():
            nbytes, make, fused, steps = getattr(routed, op)()
            buffers = make()
            workloads = [partial(fused, *buffers)], [partial(steps, *buffers)]
            device, device_steps = graph_seconds(*workloads, nbytes=nbytes, repeats=3 if quick else 7)
            case = f"{name}, {routed.case}, in L2"
            results.add(case, SPEEDUP, device * US, "us", STEPS, device_steps * US)
            eager, eager_steps = eager_seconds(*workloads, calls=100, repeats=3 if quick else 7)
            results.add(case, "speedup over separate steps (eager)", eager * US, "us", STEPS, eager_steps * US)


SECTIONS = (copy_share, routing, few_tokens)


if __name__ == "__main__":
    run("fused_moe", SECTIONS, __doc__)
