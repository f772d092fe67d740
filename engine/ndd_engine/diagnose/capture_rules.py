"""What a capture of a GPU shows beside the causes that have rules of their own, and what a trace does not show."""

from __future__ import annotations

from ndd_engine.text import counted, percent, span

from .finding import Finding
from .gpu_rules import CAPTURE, LAUNCH_GAPS, LEAST
from .view import Draft, View

TRACE = "trace"
# Kind of a gap between queued kernels -> what it is, and what to do.
BETWEEN = {
    "another stream": (
        "in which a stream waits for another one",
        "let fewer kernels wait for another stream: record events later, or wait for them later",
    ),
    "CUDA graph": (
        "inside of CUDA graphs, where kernels wait for each other or for work that was not recorded",
        "profile the same steps without the CUDA graph: it shows what the kernels wait for",
    ),
    "before a CUDA graph": (
        "before a CUDA graph that was launched in time: it waits for an event, or is still being uploaded",
        "upload CUDA graphs before their first replay, and look for events that they wait for",
    ),
    "one stream": (
        "within one stream, which waits for an event, a host function or another process on the GPU",
        "look for cudaStreamWaitEvent before these kernels, and for other processes on the GPU",
    ),
    "short": (
        "below 10 µs, which starting a kernel takes",
        "run fewer and larger kernels: fuse them with torch.compile, or use larger batches",
    ),
}


def queue_gaps(view: View) -> Finding | None:
    """Idle time between kernels that had been launched in time: the host is not the cause."""
    capture = view.kernels
    if (
        capture is None
        or (share := capture.idle_ns.get("between queued kernels", 0) / capture.wall_ns) < LAUNCH_GAPS
    ):
        return None
    title = f"the GPU is idle {percent(share)} of the time between kernels that were launched in time"
    draft = Draft("queue-gaps", title, view.part(share))
    for kind, ns, gaps in capture.queued:
        if kind in BETWEEN and ns >= LEAST * capture.wall_ns:
            text = f"{percent(ns / capture.wall_ns)} in {counted(gaps, 'gap')} {BETWEEN[kind][0]}"
            draft.saw(text, CAPTURE)
    if capture.queued and (kind := capture.queued[0][0]) in BETWEEN:
        draft.change(BETWEEN[kind][1])
    return draft.done()


def gpu_idle(view: View, alone: bool) -> Finding | None:
    """Idle time that no other rule explains. alone: there is no other finding."""
    capture = view.kernels
    if capture is None or not view.gpu:
        return None
    causes = capture.idle_ns if alone else {"other": capture.idle_ns.get("other", 0)}
    share = sum(causes.values()) / capture.wall_ns
    if share < LAUNCH_GAPS:
        return None
    main = max(causes, key=causes.__getitem__)
    title = f"the GPU is idle {percent(share)} of the time"
    longest = _range(view, causes[main])
    if view.trace is not None and not view.trace.get("operators") and longest is None:
        draft = Draft("gpu-idle", f"{title}, and the trace does not show why", view.part(share))
        draft.saw("the trace has no operators of the host", TRACE)
        draft.change("record the host as well: ProfilerActivity.CPU beside ProfilerActivity.CUDA")
    elif main == "other":
        where, seen = "host code outside of operators", "no named range of the main thread is there"
        if longest is not None:
            where, seen = f'the range "{longest[0]}"', f"this range takes {span(longest[1])} of the trace"
        draft = Draft("gpu-idle", f"{title} in {where}", view.part(share))
        draft.saw(seen, TRACE if view.trace is not None else CAPTURE)
        draft.change(
            "record Python functions (with_stack=True), or mark parts with torch.profiler.record_function"
            if view.trace is not None
            else "move this code out of the step",
            where=view.line("log", "other"),
        )
    else:
        draft = Draft("gpu-idle", f"{title}, for several causes", view.part(share))
        for cause, ns in sorted(causes.items(), key=lambda item: -item[1]):
            draft.saw(f"{cause}: {percent(ns / capture.wall_ns)}", CAPTURE)
        draft.change(f"begin with the largest part: {main}")
    return draft.done()


def host_idle(view: View) -> Finding | None:
    """A trace without a GPU, in which the processor often computes nothing for the model."""
    capture = view.snapshot.kernels
    if view.trace is None or view.trace.get("unseen") or capture is None or capture.method != "operators":
        return None
    idle = {cause: capture.idle_ns.get(cause, 0) / capture.wall_ns for cause in ("launch gaps", "other")}
    share = sum(idle.values())
    if share < LAUNCH_GAPS:
        return None
    draft = Draft(
        "user-code", f"host code between operators takes {percent(share)} of the time", view.part(share)
    )
    draft.saw(
        f"no operator runs for {percent(idle['launch gaps'])} of the trace within the phases of the model",
        TRACE,
    )
    draft.saw(f"no operator runs for {percent(idle['other'])} of the trace outside of all phases", TRACE)
    draft.change(
        "record Python functions (with_stack=True), or mark parts with torch.profiler.record_function"
    )
    return draft.done()


def _range(view: View, idle_ns: int) -> tuple[str, int] | None:
    """The named range of the host in which most of this idle time may be; None without one that is long enough."""
    name, ns = (view.trace or {}).get("range") or ("", 0)
    return (name, ns) if name and ns >= 0.5 * idle_ns else None


def gpu_unseen(view: View) -> Finding | None:
    """The trace names an accelerator whose time it does not have."""
    unseen = view.trace.get("unseen") if view.trace is not None else None
    if not unseen:
        return None
    draft = Draft("gpu-unseen", "the trace does not show what the accelerator did", None, "certain")
    draft.saw(str(unseen), TRACE)
    return draft.done()
