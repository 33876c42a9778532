"""Keys that a rank was granted: booked by the round loop, read by the inner loader's index source.

The inner loader asks for its next index when it hands a sample over, so its index source must never wait: with nothing
granted it gives an empty chunk, and whoever draws waits before asking instead, once no key is under way any more.
"""

from __future__ import annotations

import threading
from collections import deque


class GrantedKeys:
    """Positions in the shared order that this rank may read next. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._blocks: deque[range] = deque()
        self._under_way = 0  # keys taken whose samples have not come back
        self._is_complete = False
        self._is_released = False

    def start(self, blocks: tuple[range, ...], head: int, is_complete: bool) -> None:
        """A new epoch: what was granted so far, and how many other keys are read before them."""
        with self._condition:
            self._blocks = deque(block for block in blocks if len(block))
            self._under_way = head
            self._is_complete, self._is_released = is_complete, False
            self._condition.notify_all()

    def add(self, block: range, is_complete: bool) -> None:
        """More keys, behind the others; `is_complete`: there will be no more in this epoch."""
        with self._condition:
            if len(block):
                self._blocks.append(block)
            self._is_complete = self._is_complete or is_complete
            self._condition.notify_all()

    def take(self, most: int) -> list[int] | None:
        """Up to `most` positions; none where nothing is granted now, None where nothing will be."""
        with self._condition:
            out: list[int] = []
            while self._blocks and len(out) < most:
                block = self._blocks.popleft()
                num = min(len(block), most - len(out))
                out.extend(block[:num])
                if num < len(block):
                    self._blocks.appendleft(block[num:])
            self._under_way += len(out)
            return None if not out and self._is_complete else out

    @property
    def num_left(self) -> int:
        """Positions that are granted and not yet taken."""
        with self._condition:
            return sum(map(len, self._blocks))

    def came_back(self, num: int) -> None:
        """So many samples have arrived."""
        with self._condition:
            self._under_way -= num

    def wait(self) -> None:
        """Until there is something to ask the inner loader for, or its end, or nobody wants any more."""
        with self._condition:
            while not (self._under_way or self._blocks or self._is_complete or self._is_released):
                self._condition.wait()

    def release(self) -> None:
        """Lets whoever waits go: nobody will ask for more in this epoch."""
        with self._condition:
            self._is_released = True
            self._condition.notify_all()

    @property
    def is_released(self) -> bool:
        """Whether nobody will ask for more in this epoch."""
        return self._is_released
