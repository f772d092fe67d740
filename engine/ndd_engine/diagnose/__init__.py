"""Names what holds a run back: pure rules, a Snapshot in and Findings out. Imports no torch.

Phases count as shares of the time of steps, over the recent windows; what comes now and then (evaluations,
checkpoints, first batches, collections, compilations) over the whole run. A share has to be above 5 % and above two
standard errors; a signal that is missing is null, and its rule abstains.

    cause              what shows it                                             what to try
    item-collate       waits; fetch item, and the data makes one gather          loader.fetch=auto
    in-memory-workers  waits or a slowed model; workers, and one gather does     loader.workers=0
    worker-restart     first batches of epochs; workers that are not persistent  loader.persistent=true
    slow-storage       waits; an item computes less than 40 % of its time        loader.workers, loader.cache
    many-workers       waits; a batch made here takes less than the wait for one loader.workers=0
    on-the-fly         waits; items take processor time and could be kept        loader.cache=true
    few-workers        waits; items take it and cannot be kept; cores are free   loader.workers
    data-wait          waits, for none of these                                  code, with its line
    oversubscribed     threads above cores; fewer are measured to be faster      run.threads
    few-threads        threads below cores; more are measured to be faster       run.threads
    neighbour-cores    others on full cores; forward and backward slowed         stop it, run.threads
    quota              time in which the control group stops the run             run.threads
    gc                 time of Python's collections                              run.gc_every_steps
    transfer           copies by the device clock                                loader.pin_memory
    launch-bound       launch gaps of a burst; or clocks, utilization and power  speed.cuda_graph, speed.compile
    sync               waits of a burst; or the card's gap while losses are read log.every_steps, code
    tf32, amp          the model's share and FLOPs; published peaks              precision.tf32, precision.amp
    cudnn-benchmark    convolutions in a burst, of fixed shapes                  speed.cudnn_benchmark
    cudnn-shapes       convolutions in a burst; a model slower than with one    speed.cudnn_benchmark
                       shape, and cuDNN times its algorithms
    neighbour-card     other processes, a busy card, a slowed model              ask who
    throttling         NVML's reasons, and clocks that are lowered               nothing in software
    thrash             retries of the allocator                                  batch.micro, batch.accumulation
    small-micro        the part of a micro-batch that does not grow with it      batch.micro, batch.accumulation
    stepwise           many small operators; sub-phases of the decoder's loop    workload.decoder=hoisted
    user-code          gaps of a burst; or forward behind backward's pace, and   code, with its line
                       one function of an own workload seen in it
    recompile          recompilations; the model above its usual pace            speed.compile_dynamic=true
    compile-cost       seconds of compiling against those of the whole run       speed.compile=off
    deterministic      a trial that gained                                       speed.deterministic=false
    optimizer          the update's share; loop or foreach, or filled zeros      optimizer.implementation
    clip               clipping's share                                          clip.max_norm=0.0
    logging            shares of log and other; short windows, frequent reads    log.window_s, log.every_steps
    evaluation         one's mean time against its period                        evaluate.every_*, evaluate.batches
    checkpoint         one's mean time against its period                        checkpoint.every_*
    leak               memory that grows steadily and does not level off         code, with its line
    near-limit         below 4 % of memory left                                  batch.micro, batch.accumulation
    no-effect          settings that were verified not to be in effect           -
"""

from __future__ import annotations

from .finding import CAUSES, Change, Evidence, Finding
from .rules import diagnose

__all__ = ["CAUSES", "Change", "Evidence", "Finding", "diagnose"]
