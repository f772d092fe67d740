"""What a step does without need: recompilations, retained graphs, dense gradients; and what is not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_runs import NVML, Planted, alone, healthy, operation, profiled, script, worked

from ndd_console.words.run import loss_text, summary
from ndd_engine.record.events import EndEvent, MarkEvent, NotFiniteEvent

TABLE = ("Net.encoder.table", "Embedding", 1_000_000, 64, 512, 0.95, "Adam")


def stepping(tables: list[Any] | None = None, facts: dict[str, Any] | None = None, **more: Any) -> Planted:
    """A script with a profiled step. tables: its embeddings."""
    return script(facts, functions=replace(profiled(), tables=tables or []), **more)


@pytest.mark.parametrize(("threads", "offered"), [(2, True), (1, False)])
def test_one_thread_is_offered_where_nothing_slows_a_script_on_the_cpu(threads: int, offered: bool) -> None:
    found = script(run={"threads": threads}).verdict()
    assert found.cause == "healthy"
    assert (("run.threads=1",) in [change.sets for change in found.changes]) is offered


@pytest.mark.parametrize(
    ("run", "cause", "sets", "where", "advice"),
    [
        (script({"anomaly": True}), "anomaly", (), None, "set_detect_anomaly"),
        (script(run={"threads": 8}), "oversubscribed", ("run.threads=2",), None, ""),
        (
            stepping(facts={"retains": ["/me/train.py", 27]}),
            "retain-graph",
            (),
            "train.py:27",
            "retain_graph",
        ),
        (stepping(facts={"data_parallel": 8}), "data-parallel", (), None, "--nproc-per-node=8"),
        (stepping(facts={"data_parallel": 1}), "healthy", None, None, ""),
        (stepping(), "healthy", None, None, ""),
    ],
)
def test_what_is_told_without_a_cost_in_time(
    run: Planted, cause: str, sets: tuple[str, ...] | None, where: str | None, advice: str
) -> None:
    (found,) = run.found()
    assert found.cause == cause and found.ceiling is None
    if sets is not None:
        change = found.changes[0]
        assert found.sets == sets and change.where == where and advice in change.text


# Recompilation.


def recompiled(seconds: float, limit: bool = False) -> MarkEvent:
    data = {
        "graphs": 7, "seconds": seconds, "limit": limit, "reason": "bins == 7 (train.py:13 in forward)",
        "file": "/home/me/train.py", "line": 11, "function": "forward",
    }  # fmt: skip
    return MarkEvent("recompile", 40, "", data)


def test_recompilation_names_what_changes_and_where() -> None:
    found = script(marks=[recompiled(1.5)]).named("recompile")
    assert "bins" in found.title and found.share is not None and 0.1 < found.share < 0.4
    assert found.changes[0].where == "train.py:11 in forward" and not found.sets
    assert any("train.py:13" in item.text for item in found.evidence)
    assert "recompile" not in script(marks=[recompiled(0.01)]).causes()


def test_a_function_that_is_compiled_no_more_is_told_however_short_the_compilations_were() -> None:
    found = script(marks=[recompiled(0.01, limit=True)]).named("recompile")
    assert "step 40" in found.title and found.ceiling is None
    slow = healthy(data_wait=8.0)
    assert script(marks=[recompiled(0.01, limit=True)], phases=slow).verdict().cause == "recompile"
    assert script(marks=[recompiled(1.5)], phases=slow).verdict().cause == "data-wait"


def test_recompilation_in_each_of_few_steps_is_told_before_anything_else_can_be() -> None:
    few: dict[str, Any] = {
        "windows": 1,
        "steps": 6,
        "wobble": 0.0,
        "phases": {"forward": 6000.0, "backward": 10.0},
    }
    mark = replace(recompiled(5.0), data={**recompiled(5.0).data, "graphs": 1})
    found = script(marks=[mark] * 6, **few).verdict()
    assert found.cause == "recompile" and "83 %" in found.title
    # One that is made for another shape is usual.
    assert "recompile" not in script(marks=[mark], **few).causes()


# Dense gradients of tables.


@pytest.mark.parametrize(("optimizer", "backward", "zero"), [(4.0, 16.0, 1.0), (60.0, 40.0, 8.0)])
def test_a_dense_gradient_costs_what_all_phases_take_for_its_table(
    optimizer: float, backward: float, zero: float
) -> None:
    phases = healthy(forward=2.0, loss=0.5, backward=backward, optimizer=optimizer, zero_grad=zero)
    found = stepping([TABLE], phases=phases).verdict()
    assert found.cause == "dense-embedding" and "Net.encoder.table" in found.title
    cost = 0.95 * (optimizer + zero + backward - 2 * 2.5)
    assert found.share == pytest.approx(cost / sum(phases.values()), abs=0.01)
    assert "1,000,000" in found.title and "512" in found.title
    assert "sparse=True" in found.changes[0].text and "SparseAdam" in found.changes[0].text


def test_its_ceiling_is_large_where_nothing_else_takes_time() -> None:
    much = {"forward": 0.3, "backward": 300.0, "optimizer": 1700.0, "zero_grad": 70.0}
    found = stepping([(*TABLE[:5], 0.9999, "Adam")], phases=dict.fromkeys(healthy(), 0.0) | much).verdict()
    assert found.ceiling == 100.0  # the largest that is told


def test_an_optimizer_that_takes_sparse_gradients_stays_and_clipping_is_counted() -> None:
    run = stepping([(*TABLE[:6], "SGD")], phases=healthy(optimizer=6.0, clip=6.0))
    found = run.named("dense-embedding")
    assert "SGD" in found.changes[0].text and "clip_grad_norm_" in found.changes[0].text
    assert any("clipping" in item.text for item in found.evidence)


def test_one_cause_has_one_finding_and_small_costs_none() -> None:
    causes = stepping([TABLE], phases=healthy(optimizer=30.0)).causes()
    assert causes[0] == "dense-embedding" and "optimizer" not in causes
    assert "optimizer" in stepping(phases=healthy(optimizer=30.0)).causes()
    assert stepping([TABLE]).causes() == ["healthy"]  # backward takes no more than that of any model
    assert stepping([(*TABLE[:5], 0.1, "Adam")], phases=healthy(optimizer=6.0)).causes() == ["healthy"]


def test_a_gpu_is_judged_by_its_own_clock() -> None:
    device = {"forward": 7.0, "loss": 0.5, "backward": 11.5, "optimizer": 0.4, "zero_grad": 0.1}
    run = stepping([TABLE], phases=healthy(optimizer=12.0), device=device, gpu=NVML)
    assert "dense-embedding" not in run.causes()
    assert replace(run, device={**device, "optimizer": 12.0}).verdict().cause == "dense-embedding"


# Not finite.

SKIPPING = {"skipped": 19, "first_skipped": 12, "loss_scale": 0.0}
PLACE = {"file": "/home/me/train.py", "line": 15, "function": "main"}


def axis(name: str, at: list[int], places: int, size: int) -> dict[str, Any]:
    return {"axis": name, "at": at, "places": places, "size": size}


@pytest.mark.parametrize(
    ("origin", "cause", "advice"),
    [
        (
            {"what": "input", "name": "x", "nan": True, **axis("column", [3], 1, 128), "share": 1 / 128},
            "the input x is not finite (NaN in column 3 of 128)", "repair such values",
        ),
        (
            {"what": "input", "name": "batch['y']", "infinite": True, **axis("item", [1, 2, 4], 9, 64)},
            "the input batch['y'] is not finite (infinite in 9 of 64 items)", "repair such values",
        ),
        (
            {"what": "output", "name": "blocks.1.norm", "kind": "Norm", "nan": True, "share": 1.0},
            "the output of blocks.1.norm (Norm) is not finite (NaN in all values), while its inputs are",
            "division by zero",
        ),
        (
            {"what": "output", "name": "fc", "kind": "Linear", "nan": True, "share": 1.0, "largest": 2e30},
            "while its inputs are, up to 2e+30", "lower learning rate",
        ),
        (
            {"what": "gradient", "name": "fc.weight", "infinite": True, "share": 0.5, "count": 4, "of": 6},
            "the gradients of 4 of 6 parameters are not finite, such as fc.weight (infinite in 50 % of its values)",
            "bfloat16",
        ),
        (
            {"what": "parameter", "name": "fc.weight", "nan": True, "share": 1.0, "count": 2, "of": 2},
            "2 of 2 parameters are not finite", "continue from a checkpoint",
        ),
    ],
)  # fmt: skip
def test_skipped_updates_say_what_was_not_finite_first(
    origin: dict[str, Any], cause: str, advice: str
) -> None:
    found = Planted(window=SKIPPING, after={3: [NotFiniteEvent(41, **origin, **PLACE)]}).verdict()
    assert found.cause == "not-finite" and found.confidence == "certain"
    assert found.title.startswith("228 of 240 updates skipped (95 %) since step 12: ")
    assert cause in found.title and advice in found.changes[0].text
    assert found.changes[0].where == "train.py:15" and any("lowest" in item.text for item in found.evidence)


def test_a_loss_that_is_not_finite_is_the_first_finding_and_the_first_line() -> None:
    snapshot = Planted(window={"bad_loss": ("NaN", 40, 28, 0.7, 0.6)}).snapshot()
    assert loss_text(snapshot).startswith("loss NaN") and loss_text(snapshot).endswith("about step 40")
    first = summary(snapshot, None, Path("runs/it"))[0]
    assert first.startswith("finding: ") and "NaN" in first and "about step 40; " in first
    exact = Planted(window={"bad_loss": ("infinite", 40, 39, 0.7, 0.6)}).snapshot()
    assert loss_text(exact).startswith("loss infinite") and loss_text(exact).endswith("since step 40")
    grown = Planted(window={"bad_loss": ("NaN", 40, 39, 4.5e9, 2.3)}).verdict()
    assert " 2.30 to 4.5e+09" in grown.title
    assert "learning rate" in grown.changes[0].text
    # It is none any more when losses are finite again.
    assert "not-finite" not in Planted(window={"skipped": 0, "loss_scale": 65536.0}).causes()


def test_what_a_script_compiles_before_it_is_seen_to_train_may_take_longer_than_all_that_follows() -> None:
    ended = {11: [EndEvent("done", "", 240, 0)]}  # 5 s of steps

    def causes(seconds: float) -> list[str]:
        mark = MarkEvent("compile", 0, "", {"seconds": seconds, "graphs": 1})
        return script(marks=[mark], after=ended).causes()

    assert "compile-cost" in causes(20.0) and "compile-cost" in causes(3.0)
    assert "compile-cost" not in causes(0.2)


def test_one_thread_is_offered_for_short_operators_of_a_script_on_a_processor() -> None:
    loop = ("/me/train.py", 49, "f", 40, 1, 20_000_000, 45_000_000, 400, 20_000, 40, 1, "cell", "GRUCell")

    def settings(threads: int, **seen: Any) -> list[tuple[str, ...]]:
        found = script(kernels=worked(**seen), run={"threads": threads}).verdict()
        assert found.cause in ("sequential-loop", "small-operations")
        return [change.sets for change in found.changes]

    for seen in ({"loops": [loop]}, {"small": 1500, "small_ns": 80_000_000, "median_ns": 4000}):
        assert ("run.threads=1",) in settings(2, **seen)
        assert ("run.threads=1",) not in settings(1, **seen)
    # Before an own run, both are measured.
    measured = alone(threads=2, by_threads=[[1.0, 18e6]])
    own = Planted(kernels=worked(loops=[loop]), baseline=measured).verdict()
    assert own.cause == "sequential-loop" and not any(change.sets for change in own.changes)


SCORES, HEADS = "8x4x128x128", ("my/model.py", 12, "Net.forward", "mix", "MultiheadAttention")


def test_what_a_capture_has_seen_is_named_with_module_and_line() -> None:
    loop = (
        "/me/train.py",
        49,
        "Net.forward",
        40,
        1,
        20_000_000,
        45_000_000,
        400,
        20_000,
        40,
        1,
        "cell",
        "GRUCell",
    )
    found = script(kernels=worked(loops=[loop])).verdict()
    assert found.cause == "sequential-loop" and "a loop of 40 steps" in found.title
    assert found.changes[0].where == "train.py:49 in Net.forward" and "nn.GRU" in found.changes[0].text
    assert any("1.63 ms" in item.text and "10 operators" in item.text for item in found.evidence)
    logits = script(
        kernels=worked(operations=[operation("linear", "64x64, 32000x64, 32000", ms=12.0)])
    ).verdict()
    assert "projection onto 32,000 outputs" in logits.title and "head (Linear), model.py:12" in logits.title
    assert any("7.8 MiB" in item.text for item in logits.evidence)
    again = script(
        kernels=worked(repeats=[("enc", "Enc", "/me/net.py", 9, "f", 1, 12_000_000, 20_000_000)])
    ).verdict()
    assert again.title.startswith("enc (Enc) ") and again.changes[0].where == "net.py:9 in f"
    unused = script(kernels=worked(unused=[("net.*.a", "A", 2e7), ("net.*.b", "B", 1e7)])).verdict()
    assert unused.title.startswith("gradients of") and "net.*.a, net.*.b" in unused.evidence[0].text


def test_why_attention_has_no_fused_kernel() -> None:
    def of(*rows: Any) -> str:
        found = script(kernels=worked(operations=rows)).verdict()
        assert found.cause == "unfused-attention", found
        return " ".join(item.text for item in found.evidence) + found.changes[0].text

    three = "8x4x128x16, 8x4x128x16, 8x4x128x16"
    assert "dropout_p above 0" in of(operation("scaled_dot_product_attention", three, "math, dropout"))
    parts = operation("softmax", SCORES), operation("matmul", f"{SCORES}, 8x4x128x16")
    assert "written out" in of(*parts)
    assert "need_weights=False" in of(*((*one[:4], *HEADS, *one[9:]) for one in parts))
    # As within nn.TransformerEncoderLayer, which asks for no weights.
    fused = operation("scaled_dot_product_attention", three, "math, dropout")
    assert (
        "dropout_p above 0" in (text := of((*fused[:4], *HEADS, *fused[9:]))) and "need_weights" not in text
    )
    # A softmax alone is none.
    assert (
        "unfused-attention" not in script(kernels=worked(operations=[operation("softmax", SCORES)])).causes()
    )


def test_convolutions_in_the_usual_format_are_an_idea() -> None:
    found = script(
        kernels=worked(operations=[operation("conv2d", "8x3x32x32, 64x3x3x3", "channels first")])
    ).verdict()
    assert found.cause == "healthy" and ("speed.channels_last=true",) in [
        change.sets for change in found.changes
    ]
    last = script(
        kernels=worked(operations=[operation("conv2d", "8x3x32x32, 64x3x3x3", "channels last")])
    ).verdict()
    assert ("speed.channels_last=true",) not in [change.sets for change in last.changes]
