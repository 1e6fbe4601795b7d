"""Which nodes of a pool have been silent for too long, as far as we could have heard them.

A node is thought lost when news up to `silent_s` after its last sign of life has been heard and none of it was the
node's. News are the signs of life of other nodes, and the certainty that all there is has been heard
(`bus.hearing`). While nothing is heard, and after a stretch of that, no node is silent: each gets its full time again.
"""

from __future__ import annotations

from collections.abc import Collection

from streamsched.bus.hearing import Hearing


class SignsOfLife:
    """Of the nodes of one pool. Times are seconds of the pool's clock."""

    def __init__(self, silent_s: float, now: float) -> None:
        self._silent_s = silent_s
        self._heard: dict[str, float] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Whatever was not heard before now is nobody's silence."""
        self._heard.clear()
        self._since = now
        self._news_at = now
        """When we last heard something, or knew that there was nothing."""

    def note(self, node_id: str, now: float) -> None:
        self._news(now)
        self._heard[node_id] = now

    def _news(self, now: float) -> None:
        if now - self._news_at > self._silent_s / 2:
            # So long without a word is more likely ours than that of all nodes at once. And what was said meanwhile
            # may come one after the other from here on: nobody is to be judged by who happens to be first.
            self._begin(now)
        self._news_at = now

    def deaf(self, now: float) -> None:
        """Nothing was heard up to now, for reasons that are not the nodes'."""
        self._begin(now)

    def silent(self, node_ids: Collection[str], hearing: Hearing, now: float) -> list[str]:
        """Those of these nodes, ascending. All of several at once are not: then it is more likely the network."""
        if hearing is Hearing.NOTHING:
            self.deaf(now)
            return []
        if hearing is Hearing.ALL:
            self._news(now)
        if len(self._heard) > 2 * len(node_ids) + 100:  # most of them are forgotten by now
            self._heard = {node_id: at for node_id, at in self._heard.items() if node_id in node_ids}
        limit = self._news_at - self._silent_s
        silent = sorted(n for n in node_ids if self._heard.get(n, self._since) < limit)
        return [] if len(silent) == len(node_ids) > 1 else silent
