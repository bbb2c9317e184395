"""How deep parts lie within each other, or name each other: that of the library's recursion."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def too_deep(
    roots: Iterable[Node],
    parts: Callable[[Node], Iterable[Node]],
    most: int,
    weight: Callable[[Node], int] = lambda node: 1,
) -> tuple[list[Node], int] | None:
    """The first path of a depth-first search that is deeper than `most`, and its depth.

    weight: the levels that a node adds. Each node is visited once, as a compiler does that keeps
    what it has compiled.
    """
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path: list[tuple[Node, Iterator[Node]]] = [(root, iter(parts(root)))]
        depth = weight(root)
        while path:
            if depth > most:
                return [node for node, _ in path], depth
            for node in path[-1][1]:
                if node not in seen:
                    seen.add(node)
                    path.append((node, iter(parts(node))))
                    depth += weight(node)
                    break
            else:
                depth -= weight(path.pop()[0])
    return None
