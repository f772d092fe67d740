"""Finds the bottleneck of a run: pure rules that turn a Snapshot into Findings. Imports no torch.

Phase shares are taken over the recent windows; rare events (evaluations, checkpoints, first batches, garbage
collections, compilations) over the whole run. A share counts when it is above 5 % and above two standard errors. A
rule that needs a signal that is missing (null) returns no finding.

    cause              evidence                                                  what to try
    item-collate       data wait; loader.fetch=item although one gather works    loader.fetch=auto
    in-memory-workers  data wait or slower model; workers for in-memory data     loader.workers=0
    worker-restart     slow first batch per epoch; workers not persistent        loader.persistent=true
    slow-storage       data wait; an item waits for storage > 60 % of its time   loader.workers, loader.cache
    many-workers       data wait; making a batch in-process is faster            loader.workers=0
    on-the-fly         data wait; items need CPU time and can be cached          loader.cache=true
    few-workers        data wait; items cannot be cached; cores are free         loader.workers
    data-wait          data wait for none of these reasons                       code, with its line; loader.cache
    oversubscribed     more threads than cores; fewer measured faster            run.threads
    few-threads        fewer threads than cores; more measured faster            run.threads
    neighbour-cores    other processes fill the cores; slower model              run.threads, stop your own
    quota              time throttled by the cgroup CPU quota                    run.threads
    gc                 time in Python's garbage collector                        run.gc_every_steps; code
    transfer           copies by the device clock                                loader.pin_memory
    launch-bound       launch gaps in a capture; or utilization and power        speed.cuda_graph, speed.compile
                       perhaps: equal times of host and device, nothing else     a capture
    sync               synchronisation in a capture; or gaps at loss reads       log.every_steps, code
    collectives        collectives without computation in a capture              code
    straggler          one rank's own time is longer in every window             by its phase; code
    exchange           exposed communication between ranks                       parallel.*, batch.accumulation
    skew               waiting for slower ranks, another one each time           even batches
    tf32, amp          model share, MFU and published peaks                      precision.tf32, precision.amp
    cudnn-benchmark    convolutions of fixed shapes in a capture                 speed.cudnn_benchmark
    cudnn-shapes       convolutions in a capture; varying shapes slower          speed.cudnn_benchmark
    neighbour-gpu      other GPU processes, high utilization, slower model      use another GPU
    throttling         NVML throttle reasons and lowered clocks                  nothing in software
    thrash             allocator retries                                         batch.micro, batch.accumulation
    small-micro        fixed overhead per micro-batch                            batch.micro, batch.accumulation
    stepwise           many small operators in the decoder loop                  workload.decoder=hoisted
    user-code          gaps in a capture; or a slow forward and one user         code, with its line
                       function in a profiled step
    slow-function      a user's function in a profiled step                      code, with its line
    anomaly            torch.autograd.set_detect_anomaly in a script              code
    recompile          time of recompilations, and their limit, by torch         speed.compile_dynamic=true, code
    compile-cost       compile time compared with the whole run                  speed.compile=off
    deterministic      a trial that was faster                                   speed.deterministic=false
    optimizer          share of the update; loop/foreach, or zeroed gradients    optimizer.implementation
    clip               share of gradient clipping                                clip.max_norm=0.0
    logging            share of log and other; short windows, frequent reads     log.window_s, log.every_steps
    evaluation         mean time of one compared with its interval               evaluate.every_*, evaluate.batches
    checkpoint         mean time of one compared with its interval               checkpoint.every_*
    leak               memory grows steadily, or from release to release         code, with its line
    near-limit         less than 4 % of memory free                              batch.micro, batch.accumulation
    no-effect          settings verified as not in effect                        -
"""

from __future__ import annotations

from .finding import CAUSES, Change, Evidence, Finding
from .rules import diagnose

__all__ = ["CAUSES", "Change", "Evidence", "Finding", "diagnose"]
