"""Where jobs, runs and nodes are filed, so that no timer and no window has to search for them.

An index holds nothing of its own: each entry follows from one job, run or node record alone. So it is never stored,
and one made anew from everything must equal the one that was kept up to date (`ClusterState.verify` compares them).
"""

from __future__ import annotations

from collections import Counter

from .errors import BrokenInvariant
from .model import WHOLE_GPU, Job, JobSpec, JobState, NodeState, Run, RunState
from .node import NodeRecord
from .preemption import class_name
from .problem import Ask
from .speeds import Speeds


class Index:
    """Call `job`, `run` or `node` after each change of one, `forget_*` when it is gone."""

    def __init__(self) -> None:
        self.queued: dict[str, None] = {}
        self.unfit: dict[str, None] = {}
        self.held: dict[str, None] = {}
        self.finished: dict[str, float] = {}
        """Finished jobs and when, oldest first."""
        self.reserving: dict[str, tuple[str, ...]] = {}
        """Jobs that nodes are kept free for, and these."""
        self.reserved: dict[str, str] = {}
        """The same the other way round: node -> job."""
        self.stoppable: dict[str, dict[str, None]] = {}
        """Priority class -> its running jobs that are preemptible."""
        self.leases: dict[str, float] = {}
        """Runs that wait for their `started`."""
        self.stopping: dict[str, None] = {}
        """Runs that were told to stop and may be there still."""
        self.lost_runs: dict[str, None] = {}
        """Runs on nodes thought lost that have not been given up yet."""
        self.runs_of: Counter[str] = Counter()
        """Runs that each job has."""
        self.quarantined: dict[str, float] = {}
        """Nodes in quarantine and its end."""
        self.lost_nodes: dict[str, float] = {}
        """Nodes thought lost and since when."""
        self.asked: Counter[Ask] = Counter()
        """The jobs that are known, by what a worker of theirs asks for; without those for MIG profiles."""
        self.sharing: Counter[Ask] = Counter()
        """Those of them that share devices."""
        self.speeds = Speeds()
        self._asked_by: dict[str, Ask] = {}
        self._known_runs: set[str] = set()
        self._stoppable_as: dict[str, str] = {}

    def job(self, job: Job) -> None:
        job_id = job.spec.job_id
        state = job.state
        for waiting, index in (
            (JobState.QUEUED, self.queued),
            (JobState.UNFIT, self.unfit),
            (JobState.HELD, self.held),
        ):
            if state is waiting:
                index[job_id] = None
            elif index:
                index.pop(job_id, None)
        if job.ended_at is not None:
            self.finished.setdefault(job_id, job.ended_at)
        if job_id not in self._asked_by and not job.spec.mig_profile:
            self._ask(job_id, job.spec)
        if job.rate is not None or self.speeds.counted:
            self.speeds.job(job)
        if job.reservation or job_id in self.reserving:
            self._reservation(job_id, job.reservation)
        if job.spec.preemptible:
            self._stoppable(job_id, class_name(job) if state is JobState.RUNNING else None)

    def _ask(self, job_id: str, spec: JobSpec) -> None:
        ask = Ask(
            gpus=spec.gpus_per_worker,
            gpu_milli=spec.gpu_milli,
            gpu_memory_mib=spec.gpu_memory_mib,
            cpu_milli=spec.cpu_milli,
            memory_mib=spec.memory_mib,
            gpu_types=tuple(sorted(set(spec.gpu_types))),
        )
        self._asked_by[job_id] = ask
        self.asked[ask] += 1
        if spec.gpu_milli < WHOLE_GPU or spec.gpu_memory_mib:
            self.sharing[ask] += 1

    def _stoppable(self, job_id: str, name: str | None) -> None:
        """File it under the name of its class, or nowhere."""
        before = self._stoppable_as.pop(job_id, None)
        if before is not None:
            del self.stoppable[before][job_id]
            if not self.stoppable[before]:
                del self.stoppable[before]
        if name is not None:
            self._stoppable_as[job_id] = name
            self.stoppable.setdefault(name, {})[job_id] = None

    def _reservation(self, job_id: str, node_ids: tuple[str, ...]) -> None:
        for node_id in self.reserving.pop(job_id, ()):
            del self.reserved[node_id]
        if not node_ids:
            return
        self.reserving[job_id] = node_ids
        for node_id in node_ids:
            if node_id in self.reserved:
                raise BrokenInvariant(f"node {node_id} is kept free for {self.reserved[node_id]} and {job_id}")
            self.reserved[node_id] = job_id

    def forget_job(self, job_id: str) -> None:
        """Only finished jobs are forgotten."""
        del self.finished[job_id]
        self.speeds.forget(job_id)
        ask = self._asked_by.pop(job_id, None)
        for counted in (self.asked, self.sharing):
            if ask is not None and ask in counted:
                counted[ask] -= 1
                if not counted[ask]:
                    del counted[ask]

    def run(self, run: Run) -> None:
        placement_id = run.placement_id
        if placement_id not in self._known_runs:
            self._known_runs.add(placement_id)
            self.runs_of[run.job_id] += 1
        if run.state is RunState.PLACED:
            self.leases[placement_id] = run.lease_until
        else:
            self.leases.pop(placement_id, None)
        lost = run.lost_at is not None and (run.state is RunState.STOPPING or run.stop_at is None)
        for index, filed in ((self.stopping, run.stop_at is not None), (self.lost_runs, lost)):
            if filed:
                index[placement_id] = None
            else:
                index.pop(placement_id, None)

    def forget_run(self, run: Run) -> None:
        self.leases.pop(run.placement_id, None)
        self.stopping.pop(run.placement_id, None)
        self.lost_runs.pop(run.placement_id, None)
        self._known_runs.remove(run.placement_id)
        self.runs_of[run.job_id] -= 1
        if not self.runs_of[run.job_id]:
            del self.runs_of[run.job_id]

    def node(self, record: NodeRecord) -> None:
        node_id = record.spec.node_id
        if record.state is NodeState.QUARANTINED:
            self.quarantined[node_id] = record.until
        else:
            self.quarantined.pop(node_id, None)
        if record.lost:
            self.lost_nodes[node_id] = record.lost_at
        else:
            self.lost_nodes.pop(node_id, None)

    def forget_node(self, node_id: str) -> None:
        self.quarantined.pop(node_id, None)
        self.lost_nodes.pop(node_id, None)

    def sort_finished(self) -> None:
        """Bring the finished jobs into order after filing them in another."""
        self.finished = dict(sorted(self.finished.items(), key=lambda item: (item[1], item[0])))

    def verify(self, other: Index) -> None:
        """`other` is one made anew. Raises BrokenInvariant with the name of what differs."""
        for name, kept in vars(self).items():
            if kept != getattr(other, name):
                raise BrokenInvariant(f"{name.strip('_')}: something is filed wrongly")
        times = list(self.finished.values())
        if times != sorted(times):
            raise BrokenInvariant("finished: jobs are not in order of their ends")
