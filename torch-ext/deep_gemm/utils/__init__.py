"""Reference casts, scale-factor layouts and distributed helpers: the definitions that the kernels are held to."""

from . import dist, layout, math
from .dist import init_dist, uneven_all_gather
from .layout import *
from .math import *

__all__ = [*layout.__all__, *math.__all__, "init_dist", "uneven_all_gather"]
