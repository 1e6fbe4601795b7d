"""What a candidate may become: options, of which the model chooses one at most.

Most candidates have one option. More are needed where the answer depends on *which* nodes its workers share:

- one type (`one_type`, several workers): an option per GPU type;
- speeds (several types allowed, a single worker or `mixed_types`): for each distinct speed s an option "types with
  speed >= s", worth value * s / fastest. The rate of a gang is that of its slowest worker, and with s the speed of
  that worker the option is open to it; any option is worth at most what its workers make of it. So this is exact;
- topology: an option per domain in which it fits alone, and for a wish one without the bonus anywhere. For the level
  *node* the workers are one worker of the sum. A single worker only needs a node that is in some domain.

An option that has no more nodes than another one and is not worth more is left out.

Domains. Domains that hold the same (down to the structure of the narrower domains in them) stand for each other: with
n candidates that care about topology, at most n of them are in use, and by renaming these can be taken to be any n.
So n copies of each suffice, exactly. Where a candidate could still go to more than `domains_max` domains, only some
are offered: those greedy used, then in turn the tightest and the roomiest. That is not exact, and `Options.cut`
says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from streamsched.core.model import TopologyLevel
from streamsched.core.problem import TOPOLOGY_BONUS, Candidate, Problem

from .request import is_share, requests_of
from .spots import SOME_DOMAIN, WIDE_TO_NARROW, Kind, Spot, Victims, limits, merged, room

_LOOK_AT = 2
"""Domains that are looked at closely for each one that may be offered."""


@dataclass(frozen=True)
class Option:
    """One way to place a candidate: what it is worth so, and its workers."""

    worth: float
    chunks: tuple[tuple[int, int], ...]
    """((kind, workers), ...) in the order of `Candidate.chunks`."""
    joined: bool
    """All workers are on one node: `chunks` has one worker of the sum."""

    @property
    def needs(self) -> tuple[tuple[int, int], ...]:
        """((kind, workers), ...), kinds ascending."""
        total: Counter[int] = Counter()
        for kind, count in self.chunks:
            total[kind] += count
        return tuple(sorted(total.items()))


@dataclass(frozen=True)
class Demand:
    """A candidate in the model."""

    job_id: str
    rank: int
    value: float
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Options:
    kinds: list[Kind]
    demands: list[Demand]
    spots: list[Spot]
    """Nodes, told apart as far as the kinds need it."""
    cut: frozenset[str]
    """Candidates that were not offered all domains they could go to."""
    domains: int
    """The most that one candidate was offered."""


class _Scope(NamedTuple):
    """Where the workers of an option have to be together."""

    level: str
    domain: str
    joined: bool
    factor: float


class _Draft(NamedTuple):
    worth: float
    joined: bool
    chunks: tuple[tuple[Kind, int], ...]


def options_of(
    candidates: Iterable[Candidate],
    problem: Problem,
    spots: list[Spot],
    victims: Victims,
    domains_max: int,
    used: dict[str, tuple[str, ...]],
) -> Options:
    """`used`: nodes on which greedy placed a candidate, by job id."""
    return _Market(list(candidates), problem, spots, victims, domains_max, used).options()


class _Market:
    def __init__(
        self,
        candidates: list[Candidate],
        problem: Problem,
        spots: list[Spot],
        victims: Victims,
        domains_max: int,
        used: dict[str, tuple[str, ...]],
    ) -> None:
        self.candidates, self.victims, self.domains_max = candidates, victims, domains_max
        self.types = sorted({c.gpu_type for c in problem.classes})
        self.names = _names_that_matter(candidates, spots)
        self.choosy = [c for c in candidates if _level_of(c) in WIDE_TO_NARROW and _workers(c) > 1]
        levels = {_level_of(c) for c in candidates}
        self.levels = [level for level in WIDE_TO_NARROW if level in levels]
        self.used = _used_domains(self.choosy, spots, used)
        kept = _distinct_domains(spots, self.choosy, {name for names in self.used.values() for name in names})
        self.spots = merged(spots, _renaming(self.levels, kept), self.names)
        self.cut: set[str] = set()
        self.most_offered = 0
        self._by_domain: dict[tuple[str, str], list[int]] = defaultdict(list)
        for s, spot in enumerate(self.spots):
            for level, name in zip(WIDE_TO_NARROW, spot.domains, strict=True):
                if name:
                    self._by_domain[level, name].append(s)
                    self._by_domain[level, ""].append(s)
        self._fits: dict[Kind, tuple[int, int]] = {}
        self._seats_of: dict[tuple[str, int], dict[str, dict[str, int]]] = {}

    def options(self) -> Options:
        drafts = [self._drafts(candidate) for candidate in self.candidates]
        kinds = sorted({kind for ways in drafts for way in ways for kind, _ in way.chunks})
        number = {kind: k for k, kind in enumerate(kinds)}
        demands = []
        for rank, (candidate, ways) in enumerate(zip(self.candidates, drafts, strict=True)):
            if ways:
                options = tuple(
                    Option(way.worth, tuple((number[kind], n) for kind, n in way.chunks), way.joined) for way in ways
                )
                demands.append(Demand(candidate.job_id, rank, max(way.worth for way in ways), options))
        named: dict[str, set[str]] = defaultdict(set)
        for kind in kinds:
            named[kind.level].add(kind.domain)
        spots = merged(self.spots, _renaming([lv for lv in self.levels if named[lv]], named), self.names)
        return Options(kinds, demands, spots, frozenset(self.cut), self.most_offered)

    def _drafts(self, candidate: Candidate) -> list[_Draft]:
        """The options of one candidate, most valuable first."""
        found: list[_Draft] = []
        in_domains: list[tuple[int, str, list[_Draft]]] = []
        for scope in self._scopes(candidate):
            ways = [way for way in self._ways(candidate, scope) if self._fits_alone(way)]
            if scope.domain and ways:
                in_domains.append((max(self._room(way) for way in ways), scope.domain, ways))
            else:
                found += ways
        found += [way for _, _, ways in self._offered(candidate, in_domains) for way in ways]
        found.sort(key=lambda way: -way.worth)
        kept: list[_Draft] = []
        for way in found:
            if not any(self._no_better(way, other) for other in kept):
                kept.append(way)
        return kept

    def _scopes(self, candidate: Candidate) -> list[_Scope]:
        wish = candidate.topology
        free = _Scope("", "", False, 1.0)
        if wish is None:
            return [free]
        factor = 1.0 if wish.required else 1.0 + TOPOLOGY_BONUS
        if wish.level is TopologyLevel.NODE:
            if _workers(candidate) == 1:
                return [_Scope("", "", False, factor)]
            together = [] if candidate.anti_affinity else [_Scope("", "", True, factor)]
        elif _workers(candidate) == 1:
            together = [_Scope(wish.level, "", False, factor)]
        else:
            together = [_Scope(wish.level, name, False, factor) for name in self._shortlist(candidate, wish.level)]
        return together if wish.required else [*together, free]

    def _ways(self, candidate: Candidate, scope: _Scope) -> list[_Draft]:
        """By GPU types: one option per type, or per speed."""
        speeds = dict(candidate.speeds)
        allowed = {t: speeds.get(t, 1.0) for t in self.types if not candidate.gpu_types or t in candidate.gpu_types}
        fastest = max(allowed.values(), default=1.0)
        here = set(self.types)
        if scope.level:
            here = {self.spots[s].gpu_type for s in self._by_domain[scope.level, scope.domain]}
            allowed = {t: speed for t, speed in allowed.items() if t in here}
        if candidate.one_type and _workers(candidate) > 1 and not scope.joined:
            sets: list[tuple[tuple[str, ...], float]] = [((t,), speed) for t, speed in allowed.items()]
        else:
            sets = [
                (tuple(t for t, speed in allowed.items() if speed >= least), least)
                for least in sorted(set(allowed.values()), reverse=True)
            ]
        return [
            _Draft(
                candidate.value * scope.factor * (speed / fastest if fastest > 0 else 1.0),
                scope.joined,
                self._chunks(candidate, scope, () if here.issubset(types) else types),
            )
            for types, speed in sets
        ]

    def _chunks(self, candidate: Candidate, scope: _Scope, types: tuple[str, ...]) -> tuple[tuple[Kind, int], ...]:
        workers = _workers(candidate)
        sizes = ((candidate.total_gpus, 1),) if scope.joined else candidate.chunks
        each = workers if scope.joined else 1
        share = is_share(candidate)
        kind = Kind(
            gpus=0,
            cpu_milli=candidate.cpu_milli * each,
            memory_mib=candidate.memory_mib * each,
            gpu_types=types,
            level=scope.level,
            domain=scope.domain,
            anti_affinity=candidate.anti_affinity if candidate.anti_affinity in self.names else "",
            tiers=0 if share else self.victims.tiers_below(candidate.level),
            gpu_memory_mib=candidate.gpu_memory_mib if share else 0,
            share=share and not candidate.mig_profile,
            mig_profile=candidate.mig_profile,
            avoid_nodes=tuple(sorted(set(candidate.avoid_nodes))),
        )
        return tuple((kind._replace(gpus=gpus), count) for gpus, count in sizes)

    # ── where it fits ──────────────────────────────────────────────────────────────────────────────

    def _where(self, kind: Kind) -> tuple[int, int]:
        """(spots in which it fits as a bit set, workers for which there is room)."""
        if kind not in self._fits:
            among = self._by_domain[kind.level, kind.domain] if kind.level else range(len(self.spots))
            mask = total = 0
            for s in among:
                workers = room(kind, self.spots[s])
                if workers:
                    mask |= 1 << s
                    total += workers * len(self.spots[s].node_ids)
            self._fits[kind] = mask, total
        return self._fits[kind]

    def _fits_alone(self, way: _Draft) -> bool:
        """A necessary condition, exact for equal workers."""
        needs: Counter[Kind] = Counter()
        for kind, count in way.chunks:
            needs[kind] += count
        return all(self._where(kind)[1] >= count for kind, count in needs.items())

    def _room(self, way: _Draft) -> int:
        return min(self._where(kind)[1] // count for kind, count in way.chunks)

    def _no_better(self, way: _Draft, other: _Draft) -> bool:
        """`other`, which is worth no less, can be had wherever `way` can."""
        return way.joined == other.joined and all(
            not self._where(a)[0] & ~self._where(b)[0] for (a, _), (b, _) in zip(way.chunks, other.chunks, strict=True)
        )

    def _shortlist(self, candidate: Candidate, level: TopologyLevel) -> list[str]:
        """Domains of a level whose devices would do; of very many the most promising, so as not to look at each."""
        rooms: list[tuple[int, str]] = []
        needs: Counter[int] = Counter()
        for gpus, count in candidate.chunks:
            needs[gpus] += count
        seats = [(self._seats(level, gpus), count) for gpus, count in needs.items()]
        for name in seats[0][0]:
            fits = min(
                sum(n for t, n in by_type[name].items() if not candidate.gpu_types or t in candidate.gpu_types) // count
                for by_type, count in seats
            )
            if fits:
                rooms.append((fits, name))
        most = _LOOK_AT * self.domains_max
        if len(rooms) > most:
            self.cut.add(candidate.job_id)
            rooms = _promising(rooms, self.used.get(candidate.job_id, ()), most)
        return sorted(name for _, name in rooms)

    def _seats(self, level: TopologyLevel, gpus: int) -> dict[str, dict[str, int]]:
        """Domain name -> GPU type -> workers of that size, going by devices (those of victims too) alone."""
        if (level, gpus) not in self._seats_of:
            found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
            for spot in self.spots:
                name = spot.domain(level)
                if name and name != SOME_DOMAIN:
                    free, _, _ = limits(spot, len(self.victims.levels))
                    found[name][spot.gpu_type] += free // gpus * len(spot.node_ids)
            self._seats_of[level, gpus] = found
        return self._seats_of[level, gpus]

    def _offered(
        self, candidate: Candidate, domains: list[tuple[int, str, list[_Draft]]]
    ) -> list[tuple[int, str, list[_Draft]]]:
        """At most `domains_max` of them."""
        self.most_offered = max(self.most_offered, min(len(domains), self.domains_max))
        if len(domains) <= self.domains_max:
            return domains
        self.cut.add(candidate.job_id)
        chosen = _promising([d[:2] for d in domains], self.used.get(candidate.job_id, ()), self.domains_max)
        names = {name for _, name in chosen}
        return [d for d in domains if d[1] in names]


def _promising(rooms: list[tuple[int, str]], used: tuple[str, ...], most: int) -> list[tuple[int, str]]:
    """Of (room, domain) those that greedy used, then in turn the tightest and the roomiest."""
    ordered = sorted(rooms)
    first = [d for d in ordered if d[1] in used]
    rest = deque(d for d in ordered if d[1] not in used)
    while rest and len(first) < most:
        first.append(rest.popleft() if len(first) % 2 == 0 else rest.pop())
    return first[:most]


def _workers(candidate: Candidate) -> int:
    return sum(count for _, count in candidate.chunks)


def _level_of(candidate: Candidate) -> TopologyLevel | None:
    return candidate.topology.level if candidate.topology else None


def _names_that_matter(candidates: list[Candidate], spots: list[Spot]) -> frozenset[str]:
    """Anti-affinity names that can keep a worker off a node: taken somewhere, or of two workers at least."""
    workers: Counter[str] = Counter()
    for candidate in candidates:
        workers[candidate.anti_affinity] += sum(count for _, count in requests_of(candidate))
    taken = {name for spot in spots for name in spot.taken}
    return frozenset(name for name, count in workers.items() if name and (count > 1 or name in taken))


def _renaming(levels: list[TopologyLevel], kept: dict[str, set[str]]) -> Callable[[int, str], str]:
    """Names of domains as far as they matter: kept ones, else that there is one, at levels nobody asks for nothing."""

    def rename(index: int, name: str) -> str:
        level = WIDE_TO_NARROW[index]
        if level not in levels:
            return ""
        return name if name in kept[level] else SOME_DOMAIN

    return rename


def _used_domains(
    choosy: list[Candidate], spots: list[Spot], used: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Names of the domains, of all levels, that the nodes of each topology candidate are in."""
    wanted = {n for c in choosy for n in used.get(c.job_id, ())}
    if not wanted:
        return {}
    domains = {n: spot.domains for spot in spots for n in wanted.intersection(spot.node_ids)}
    return {
        c.job_id: tuple(sorted({name for n in used.get(c.job_id, ()) for name in domains.get(n, ()) if name}))
        for c in choosy
    }


# ── domains that stand for each other ──────────────────────────────────────────────────────────────────────────────


def _distinct_domains(spots: list[Spot], choosy: list[Candidate], used: set[str]) -> dict[str, set[str]]:
    """Per level the domains that options may name: of equal ones as many as there are topology candidates.

    From wide to narrow, so that what is kept of a narrow level lies in what is kept of the wide ones. Domains that
    greedy used come first.
    """
    kept: dict[str, set[str]] = {level: set() for level in WIDE_TO_NARROW}
    levels = [level for level in WIDE_TO_NARROW if any(_level_of(c) is level for c in choosy)]
    sizes = {level: Counter(spot.domain(level) for spot in spots) for level in levels}
    for depth, level in enumerate(levels):
        members: dict[str, list[Spot]] = defaultdict(list)
        for spot in spots:
            if spot.domain(level) and all(spot.domain(w) in kept[w] or not spot.domain(w) for w in levels[:depth]):
                members[spot.domain(level)].append(spot)
        equal: dict[object, list[str]] = defaultdict(list)
        for name, own in sorted(members.items()):
            if len(own) == sizes[level][name]:
                equal[_shape(own, levels[:depth], levels[depth + 1 :], sizes)].append(name)
            else:
                equal[name].append(name)
        for names in equal.values():
            kept[level].update(sorted(names, key=lambda name: (name not in used, name))[: len(choosy)])
    return kept


def _shape(
    spots: list[Spot],
    wider: list[TopologyLevel],
    narrower: list[TopologyLevel],
    sizes: dict[TopologyLevel, Counter[str]],
) -> object:
    """What a domain holds; equal for two domains that can be swapped without anybody seeing a difference."""
    if not narrower:
        content: Counter[object] = Counter()
        for spot in spots:
            key = (
                *(spot.gpu_type, spot.free, spot.cpu_milli, spot.memory_mib, spot.gpu_memory_mib, spot.taken, spot.mig),
                *(spot.alone, *(spot.domain(level) for level in wider), *(bool(name) for name in spot.domains)),
            )
            content[key] += len(spot.node_ids)
        return frozenset(content.items())
    level, *deeper = narrower
    parts: dict[str, list[Spot]] = defaultdict(list)
    for spot in spots:
        parts[spot.domain(level)].append(spot)
    shapes: Counter[object] = Counter()
    for name, own in parts.items():
        within = SOME_DOMAIN if name and len(own) == sizes[level][name] else name
        shapes[within, _shape(own, wider, deeper, sizes)] += 1
    return frozenset(shapes.items())
