"""What no policy can beat: an infinite cache, and the optimum for a size."""

import numpy as np

from kvtide.replay.trace import Ids
from services.scheduler.core.belady import Belady, Segment
from services.scheduler.core.node import Node
from services.scheduler.core.tree import RadixTree

ID_TOKENS = 2  # an id of 64 bits is two tokens of the tree


class Bounds:
    """A trace cut into segments. `pages`: each request's page ids."""

    def __init__(self, pages: list[Ids]) -> None:
        self.infinite: list[int] = []  # leading pages of each request that an earlier one had
        self._paths: list[list[Segment]] = []  # of each request
        packed = [ids.astype("<i8").tobytes() for ids in pages]
        tree = RadixTree(ID_TOKENS, lambda node: (0, 0))
        for tokens, ids in zip(packed, pages, strict=True):
            tree.insert(b"", tokens, np.zeros(len(ids), np.int32), len(ids))
        segments: dict[Node, Segment] = {}
        for tokens, ids in zip(packed, pages, strict=True):
            self._add(tree.match_prefix(b"", tokens, len(ids)).device, segments)
        self.unique_pages = sum(segment.pages for segment in segments.values())
        self._belady = Belady(self._paths)

    def _add(self, nodes: list[Node], segments: dict[Node, Segment]) -> None:
        path: list[Segment] = []
        depth = known = 0
        for node in nodes:
            if node in segments:
                known = depth + node.pages
            else:
                segments[node] = Segment(depth, node.pages)
            path.append(segments[node])
            depth += node.pages
        self._paths.append(path)
        self.infinite.append(known)

    def optimum(self, capacity: int) -> list[int]:
        """Leading pages of each request that the best possible cache of `capacity` pages has when it comes."""
        return self._belady.hits(capacity)
