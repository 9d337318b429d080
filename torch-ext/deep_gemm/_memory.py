"""Which bytes of memory strided views share."""

import math

# An exact answer for contrived strides can take a search over every row; past this many steps the views count as
# overlapping.
_MAX_STEPS = 100_000


def extent(tensor) -> int:
    """Bytes from the first to past the last byte of a view; 0 where it is empty."""
    if not tensor.numel():
        return 0
    return (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()


def overlaps_itself(tensor) -> bool:
    """Whether two indices of a view name the same element; exact up to 2-D, above it interleaved strides count too."""
    if not tensor.numel():
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    if len(dims) == 2:
        (stride_a, size_a), (stride_b, size_b) = dims
        # i * stride_a = j * stride_b has the smallest solution i = stride_b / g, j = stride_a / g.
        g = math.gcd(stride_a, stride_b) or 1
        return stride_a == 0 or (stride_b // g < size_a and stride_a // g < size_b)
    end = 1
    for stride, size in dims:
        if stride < end:
            return True
        end = (size - 1) * stride + end
    return False


def overlap(a, b) -> bool:
    """Whether two views share a byte; exact, but for contrived strides, where True is the safe answer."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    if a_start + extent(a) <= b_start or b_start + extent(b) <= a_start:
        return False
    # They meet where sum(stride * index) over both, and over the bytes of an element, comes to the distance.
    bounds, distance = {}, b_start - a_start
    for tensor, sign in ((a, 1), (b, -1)):
        element = tensor.element_size()
        strides = [1, *(stride * element for stride in tensor.stride())]
        for size, stride in zip([element, *tensor.shape], strides):
            bounds[stride] = bounds.get(stride, 0) + size - 1
            if sign < 0:  # -index is index' - (size - 1) with index' in the same range
                distance += (size - 1) * stride
    bounds.pop(0, None)
    terms = sorted(((stride, bound) for stride, bound in bounds.items() if bound), reverse=True)
    return _has_solution(terms, distance)


def _has_solution(terms, target) -> bool:
    """Whether integers 0 <= x <= bound make sum(stride * x) == target; terms are (stride, bound), strides falling."""
    reach, divisor = [0], [0]
    for stride, bound in reversed(terms):
        reach.insert(0, reach[0] + stride * bound)
        divisor.insert(0, math.gcd(divisor[0], stride))
    stack, steps = [(0, target)], 0
    while stack:
        i, rest = stack.pop()
        if rest < 0 or rest > reach[i] or (divisor[i] and rest % divisor[i]):
            continue
        if i == len(terms):
            return True
        stride, bound = terms[i]
        low, high = max(0, -((reach[i + 1] - rest) // stride)), min(bound, rest // stride)
        steps += max(0, high - low + 1)
        if steps > _MAX_STEPS:
            return True
        stack.extend((i + 1, rest - stride * x) for x in range(low, high + 1))
    return False
