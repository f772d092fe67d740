"""A side of several ranks: its process is rank 0 and starts the others, which take every step together with it.

`python -m ndd_engine.trial.side_ranks IN OUT FOLDER` is a rank other than 0. Only rank 0 talks to the trial: it passes
the commands on over a gloo group. The others wait in it between the runs of a block: they use no processor, and no
collective of the training is open. If a rank fails, rank 0 answers with its reason. When rank 0 ends, however that
happens, the pipes of the others close and they end as well.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from ndd_engine.child import ChildError, ChildProcess, Json, draft_of
from ndd_engine.diagnose import diagnose

from .peaks import peak_memory
from .side import RANKS, Blocks, Side

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ndd_engine.run.run import Run
    from ndd_engine.train.parallel.rank_loop import RankLoop
    from ndd_engine.train.prepare import Prepared
    from ndd_engine.train.training_run import Training

MODULE = "ndd_engine.trial.side_ranks"
# After a failure of rank 0, seconds in which another rank may tell that it was the first to fail.
ARRIVAL_S = 1.0
# After the failure of another rank, seconds until rank 0 is not waited for, which may hang in a collective.
PATIENCE_S = 3.0
# Findings that say nothing about what takes the time.
_NO_CAUSE = ("too-short", "healthy")


class Others:
    """The ranks other than 0 as rank 0 sees them: starts their processes.

    size: number of ranks. failed: the first failure of one of them; None as long as there is none.
    """

    def __init__(self, side: Side, size: int) -> None:
        self.failed: ChildError | None = None
        self._side, self._ending = side, False
        self._lock = threading.Lock()
        self._children = [ChildProcess(MODULE, side.folder, {RANKS: "1"}) for _ in range(1, size)]

    def train(self, command: Json, port: int) -> None:
        """Let them open the run of a command. port: of the store of all ranks."""
        size = len(self._children) + 1
        for rank, child in enumerate(self._children, 1):
            asked = {**command, "rank": rank, "size": size, "port": port}
            threading.Thread(target=self._watch, args=(rank, child, asked), daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(child.pid for child in self._children)

    def _watch(self, rank: int, child: ChildProcess, asked: Json) -> None:
        """Wait for the end of a rank, which answers only if it fails."""
        try:
            child.ask(asked, None, lambda _stage: None)
        except ChildError as error:
            found = ChildError(error.kind, f"rank {rank}: {error}", error.status)
        else:
            found = ChildError("failed", f"rank {rank} ended")
        with self._lock:
            if self.failed is not None or self._ending:
                return
            self.failed = found
        time.sleep(PATIENCE_S)
        with self._lock:
            if self._ending:
                return
        self._side.pipe.send({"error": str(found), "kind": found.kind, "status": found.status})
        self._side.leave()

    def cause(self) -> ChildError | None:
        """After a failure of rank 0: the failure of another rank that came before it."""
        deadline = time.monotonic() + ARRIVAL_S
        while self.failed is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._ending = True
            return self.failed

    def close(self) -> None:
        """End them and wait for it."""
        with self._lock:
            self._ending = True
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.close()


def lead(side: Side, command: Json, size: int) -> Training:
    """Start the other ranks and open the run as rank 0."""
    from torch._C._distributed_c10d import TCPStore

    # The system chooses the port.
    store = TCPStore("localhost", 0, size, True, wait_for_workers=False)
    if side.others is None:
        side.others = Others(side, size)
    side.others.train(command, store.port)
    return _opened(side, command, 0, size, store)


def _opened(side: Side, command: Json, rank: int, size: int, store: Store) -> Training:
    from ndd_engine.train.parallel.rank_place import Place, notes_of
    from ndd_engine.train.parallel.world import STORE_TIMEOUT
    from ndd_engine.train.rank_run import open_rank
    from ndd_engine.train.request import Ranks, RunRequest
    from ndd_engine.train.training_run import Training

    store.set_timeout(STORE_TIMEOUT)
    request = RunRequest(draft_of(command), side.folder / "runs", probes=False)
    here = Place(rank, size, rank, size)
    training = Training(request, Ranks(here, store, notes_of(store, here)))
    open_rank(training, side.heard)
    return training


class OtherRank(Side):
    """The process of a rank other than 0."""

    def open(self, command: Json) -> Training:
        from torch._C._distributed_c10d import TCPStore

        size = int(command["size"])
        store = TCPStore("localhost", int(command["port"]), size, False)
        return _opened(self, command, int(command["rank"]), size, store)

    def _error(self, error: BaseException) -> Json:
        from ndd_engine.train.parallel.rank_place import OtherRankError

        if isinstance(error, OtherRankError):
            self.leave()  # rank 0 reports it
        return super()._error(error)

    def clean_up(self) -> None:
        """The caches of compiled code are rank 0's to remove."""
        self.end_workers()


class RankBlocks(Blocks):
    """The blocks of one rank: runs end on all ranks after the same step."""

    _loop: RankLoop

    def __init__(self, side: Side, run: Run, prepared: Prepared, begin: float) -> None:
        import torch.distributed as dist

        from ndd_engine.train.parallel.world import CONTROL_TIMEOUT, Exchange

        super().__init__(side, run, prepared, begin)
        self._exchange = Exchange(dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
        others = side.others
        self._without = () if others is None else others.pids
        side.facts.ranks = self._exchange.size

    def _over(self) -> bool:
        if self._until is None or self._calls < self._least:
            return False
        return self._exchange.from_first(super()._over)

    def _asked(self, answer: Json) -> Json:
        exchange, pipe = self._exchange, self._side.pipe
        with self._loop.quiet():
            exchange.from_all(lambda: None)  # all ranks are at rest before the other side begins
            self._loop.compared()
            if exchange.leads:
                pipe.send(answer)
            while (command := exchange.from_first(pipe.receive))["do"] != "train":
                facts = self._facts()
                if exchange.leads:
                    pipe.send(facts)
        return command

    def _facts(self) -> Json:
        """Of all ranks, on rank 0."""
        self._run.recorder.flush()
        losses = [float(loss) for loss in self._losses]
        every = self._exchange.from_all(lambda: (losses, peak_memory(self._device, self._without)))
        if not every:
            return {}
        facts = self._side.facts
        facts.losses = [sum(values) / len(values) for values in zip(*(one for one, _ in every), strict=True)]
        facts.rank_peaks = [peak for _, (peak, _) in every if peak is not None]
        facts.peak_bytes = max(facts.rank_peaks, default=None)
        facts.reserved_bytes = max((most for _, (_, most) in every if most is not None), default=None)
        if self._measuring:
            facts.parts_ns = self._side.parts.per_step()
            found = diagnose(self._run.recorder.snapshot())
            facts.findings = [one.to_dict() for one in found if one.cause not in _NO_CAUSE]
        return asdict(facts)


if __name__ == "__main__":
    OtherRank.main(sys.argv[1:])
