"""The user's own code: slow functions, what they call (logging, libraries, waits), and what evaluations call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import OWN_LOOP
from hypothesis import given
from hypothesis import strategies as st
from planted_runs import HEALTHY, MS, Planted, beside, cores, evaluated, healthy, own, profiled, script

from ndd_console.words.finding import finding_line
from ndd_engine.diagnose import Finding, diagnose
from ndd_engine.diagnose.view import View
from ndd_engine.record.events import FunctionsEvent, MarkEvent, StacksEvent


def called(
    function: str, library: str, ms: float, name: str = "main", phase: str = "other", calls: int = 1
) -> Any:
    return ("/me/train.py", 17, name, function, library, calls, round(ms * MS), phase)


def calling(other: float, *calls: Any, functions: FunctionsEvent | None = None, **more: Any) -> Planted:
    step = replace(functions or profiled(), calls=list(calls), phases={"other": round(other * MS)})
    return script(phases=healthy(other=other), functions=step, **more)


LOG = called("LightningModule.log", "lightning", 7.0, "Net.training_step", calls=12)
STEP = profiled(("other", "/me/train.py", 12, "Net.training_step", 7.4))


def test_logging_at_each_step_is_found_instead_of_the_function_that_logs() -> None:
    run = calling(8.0, LOG, called("RichProgressBar.on_train_batch_end", "lightning", 0.5), functions=STEP)
    assert run.causes()[0] == "logging" and not {"slow-function", "user-code"} & set(run.causes())
    found = run.verdict()
    assert "LightningModule.log" in found.title and "12 times" in found.title and "train.py:17" in found.title
    assert found.share == pytest.approx(7.5 / 27.8, abs=0.01)
    assert "self.log" in found.changes[0].text


@pytest.mark.parametrize(
    ("function", "library", "advice"),
    [
        ("print", "", "print"),
        ("Run.log", "wandb", "log every"),
        ("SummaryWriter.add_scalar", "torch", "log every"),
    ],
)
def test_writers_and_print_are_logging_unless_they_take_little(
    function: str, library: str, advice: str
) -> None:
    assert advice in calling(8.0, called(function, library, 7.0)).named("logging").changes[0].text
    assert "logging" not in calling(8.0, called(function, library, 0.3)).causes()


def test_one_call_in_each_step_is_usual_unless_it_takes_much_and_functions_are_known_by_name() -> None:
    for ms, calls, told in ((3.0, 1, False), (3.0, 2, True), (7.0, 1, True)):
        run = calling(8.0, called("LightningModule.log", "lightning", ms, calls=calls))
        assert ("logging" in run.causes()) == told
    assert "logging" not in calling(8.0, called("torch.log", "torch", 7.0)).causes()
    step = profiled(("other", "/me/train.py", 40, "Board.add_scalar", 6.0))
    found = calling(8.0, functions=step).verdict()
    assert found.cause == "logging" and "train.py:40" in found.title


def test_a_call_that_waits_is_the_place_of_a_wait() -> None:
    step = profiled(("other", "/me/train.py", 12, "fetch", 7.0))
    found = calling(8.0, called("Queue.get", "", 6.8, "fetch"), functions=step).named("slow-function")
    assert "Queue.get" in found.title and "loops" not in found.changes[0].text
    found = calling(8.0, called("DataFrame.xs", "pandas", 6.8, "fetch"), functions=step).named(
        "slow-function"
    )
    assert "DataFrame.xs" in found.title and "less often" in found.changes[0].text


@pytest.mark.parametrize(("timed", "ahead"), [(False, True), (None, False)])
def test_what_makes_batches_and_is_not_timed_as_that_is_to_work_ahead(
    timed: bool | None, ahead: bool
) -> None:
    step = profiled(("other", "/me/train.py", 12, "Feed.next_batch", 7.0))
    told = {"file": "/me/train.py", "line": 12, "function": "next_batch"}
    mark = MarkEvent(
        "note", 0, "batches are made by next_batch", told if timed is None else {**told, "timed": timed}
    )
    found = calling(8.0, functions=step, marks=[mark]).named("slow-function")
    assert ("ahead" in found.changes[0].text) == ahead
    assert ("once before training" in found.changes[0].text) != ahead
    other = profiled(("other", "/me/train.py", 12, "Board.draw", 7.0))
    assert "ahead" not in calling(8.0, functions=other, marks=[mark]).named("slow-function").changes[0].text


def test_time_outside_the_model_is_that_of_a_call_and_advice_is_one_that_helps_it() -> None:
    scaler = calling(8.0, called("GradScaler.step", "torch", 7.0)).named("user-code")
    assert "GradScaler.step" in scaler.title and "bfloat16" in scaler.changes[0].text
    library = calling(8.0, called("Trainer.training_step", "transformers", 7.0)).named("user-code")
    assert "Trainer.training_step of transformers" in library.title and not library.changes
    assert not calling(8.0).named("user-code").changes
    many = calling(8.0, called("Categorical.log_prob", "torch", 7.0, calls=20)).named("user-code")
    assert "20 times" in many.changes[0].text
    once = calling(8.0, called("torch.svd", "torch", 7.0)).named("user-code")
    assert "not need" in once.changes[0].text
    compiled = called(
        "_fn", "torch", 6.0
    )  # a function that torch.compile has compiled, which calls no module
    assert "user-code" not in calling(8.0, compiled).causes()
    beside = calling(16.0, compiled, called("torch.svd", "torch", 8.0)).named("user-code")
    assert "torch.svd" in beside.title and "_fn" not in beside.title
    world = calling(8.0, called("TimeLimit.step", "gymnasium", 7.0, calls=20)).named("user-code")
    assert "several environments" in world.changes[0].text and "few steps" not in world.changes[0].text


def test_what_a_framework_does_within_fit_is_no_advice() -> None:
    signature = called("_signature_from_callable", "", 7.0, "<module>", calls=2)
    step = replace(profiled(), calls=[signature], phases={"other": 8 * MS})
    for facts, advised in (({"obeys": ["checkpoint"]}, False), ({}, True)):
        found = script(facts, phases=healthy(other=8.0), functions=step).named("user-code")
        assert bool(found.changes) == advised and "_signature_from_callable" in found.title


def test_time_outside_the_model_is_that_of_the_function_which_contains_most_of_it() -> None:
    others = [
        ["/me/train.py", 5, name, 1, total, MS, "", "other"]
        for name, total in (("main", 20 * MS), ("log", MS))
    ]

    def found(name: str = "Watch.on_batch_end", ms: float = 7.0) -> Finding:
        row = ["/me/train.py", 9, name, 1, round(ms * MS), 3 * MS, "", "other"]
        step = FunctionsEvent(100, 20 * MS, [*others, row], [])
        small = called("Tensor.tolist", "torch", 2.0, name, calls=6)
        return calling(8.0, small, functions=step).named("user-code")

    assert found().title.endswith(" train.py:9 in Watch.on_batch_end")
    # Smaller ones that call a phase, which is in their totals.
    others.append(["/me/train.py", 3, "backward", 1, 6 * MS, MS // 100, "", "other"])
    others.append(["/me/train.py", 4, "Net.training_step", 1, 5 * MS, 2 * MS, "", "other"])
    assert found().title.endswith(" train.py:9 in Watch.on_batch_end")
    assert "environments" in found("CartEnv.step").changes[0].text
    assert "environments" not in found().changes[0].text
    assert "Tensor.tolist" in found("Source.__iter__").title and "Tensor.tolist" in found(ms=2.0).title


def in_evaluation(*calls: Any, phase: str = "evaluate") -> Finding:
    inside = FunctionsEvent(100, 1000 * MS, [], calls=list(calls), inside=phase)
    after = {n: [beside(phase, 400, 20 * n + 20), *([inside] if n == 5 else [])] for n in range(12)}
    cause = {"evaluate": "evaluation", "checkpoint": "checkpoint"}[phase]
    return script(after=after).named(cause)


def test_the_function_that_takes_the_time_of_evaluations_is_named_with_what_helps() -> None:
    joins = called("torch_pad_and_concatenate (torch.cat)", "transformers", 790, "<module>")
    found = in_evaluation(joins, called("Module.__call__", "torch", 80, phase="forward"))
    assert "79 % " in found.title and "torch_pad_and_concatenate (torch.cat)" in found.title
    assert "preprocess_logits_for_metrics" in found.changes[0].text
    assert "train.py:17" in finding_line(found)
    assert "once" in in_evaluation(called("torch.cat", "torch", 790)).changes[0].text
    # Where the model takes the time, nothing else is accused.
    model = in_evaluation(
        called("Module.__call__", "torch", 900, phase="forward"), called("torch.cat", "torch", 30)
    )
    assert "cat" not in model.title + model.changes[0].text and "the model 90 %" in model.evidence[1].text
    assert "torch.save" in in_evaluation(called("torch.save", "torch", 900), phase="checkpoint").title


def test_evaluations_of_an_own_model_are_explained_as_well() -> None:
    inside = FunctionsEvent(
        100,
        1000 * MS,
        [["/me/net.py", 9, "Accuracy.update", 30, 900 * MS, 900 * MS, "", "other"]],
        inside="evaluate",
    )
    after = {n: [*evaluated(200, 20 * n + 20), inside] for n in range(12)}
    found = Planted(workload="net:factory", sets=["evaluate.every_steps=20"], after=after).named("evaluation")
    assert "90 % " in found.title and "net.py:9 in Accuracy.update" in found.title
    assert found.sets[0].startswith("evaluate.every_steps=")


def test_a_share_of_each_step_is_less_of_a_run_that_mostly_evaluates() -> None:
    after = {n: [beside("evaluate", 400, 20 * n + 20)] for n in range(12)}
    found = calling(8.0, LOG, functions=STEP, after=after).named("logging")
    # Steps take 556 of 956 ms.
    assert found.share == pytest.approx(7.0 / 27.8 * 556 / 956, abs=0.01)
    assert found.ceiling == pytest.approx(1 / (1 - found.share))


@pytest.mark.parametrize(("threads", "wanted"), [(1, 2.0), (2, 1.33)])
def test_neighbours_cost_no_more_than_they_use_and_come_last(threads: int, wanted: float) -> None:
    own = {1: 0.4, 2: 1.4}[threads]
    neighbours = [{"pid": 7, "name": "your run two", "cores": 0.5, "stoppable": True}]
    host = cores(own + 0.5, own, usable=float(threads), neighbours=neighbours)
    machine = {"threads": threads, "usable_cores": float(threads)}
    run = calling(2.9, called("print", "", 2.0, calls=9), host=host, run=machine)
    assert run.causes()[0] == "logging"
    found = run.named("neighbour-cores")
    assert found.share is not None and 1 / (1 - found.share) <= wanted + 0.01
    assert "run two" in found.title


def test_beside_other_programs_a_phase_that_is_rarely_long_is_not_blamed_on_a_profiled_call() -> None:
    for used, named in ((1.9, True), (0.2, False)):
        run = calling(4.5, called("Tensor.square", "torch", 4.0), host=cores(2.0, used))
        snapshot = run.snapshot()
        phases = [
            replace(one, p50_ns=MS // 2 if one.name == "other" else one.host_ns) for one in snapshot.phases
        ]
        found = diagnose(replace(snapshot, phases=tuple(phases)))
        assert any("Tensor.square" in item.title for item in found) == named


def test_beside_other_programs_a_single_call_that_logs_is_not_blamed() -> None:
    busy = cores(2.0, 0.2, neighbours=[{"pid": 7, "name": "stress", "cores": 1.8, "stoppable": True}])
    for calls, host, first in ((1, None, "logging"), (1, busy, "user-code"), (12, busy, "logging")):
        logs = called("_LoggerConnector.on_batch_end", "lightning", 7.0, "<module>", calls=calls)
        facts = {} if host is None else {"host": host}
        assert calling(8.0, logs, **facts).verdict().cause == first


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_delay_no_thread_that_sleeps(threads: int) -> None:
    """The shares of a sleep and of other processes add up to no more than the whole."""
    neighbours = [{"pid": 7, "name": "stress", "cores": 1.8, "stoppable": True}]
    host = cores(2.0, 0.2, neighbours=neighbours)

    def share(function: str, ms: float) -> float | None:
        run = calling(80.0, called(function, "", ms), host=host, run={"threads": threads})
        return next((one.share for one in run.found() if one.cause == "neighbour-cores"), None)

    assert (share("heavy", 78.0) or 0.0) >= 0.8
    for asleep in (50.0, 78.0):
        assert (share("time.sleep", asleep) or 0.0) <= 1 - asleep / 99.8 + 1e-3


@pytest.mark.parametrize(("own_cores", "most"), [(1.0, 1.1), (0.5, 2.3)])
@pytest.mark.parametrize("loader", [None, {"workers": 1}])
def test_beside_collections_neighbours_cost_what_the_rest_of_the_time_allows(
    own_cores: float, most: float, loader: Any
) -> None:
    """Collecting takes one core: of those that others use, it lacks only what it does not get of that one."""
    neighbours = [{"pid": 7, "name": "stress", "cores": 2 - own_cores, "stoppable": True}]
    gc = {"gc_ns": 97 * 20 * MS // 5, "gc_count": 20, "gc_max_ns": 20 * MS}
    run = script(None, loader, {"threads": 2}, window=gc, host=cores(2.0, own_cores, neighbours=neighbours))
    assert run.verdict().cause == "gc"
    found = [item.ceiling for item in run.found() if item.cause == "neighbour-cores"]
    assert all(ceiling is not None and ceiling <= most for ceiling in found)
    # It may get no whole core.
    assert found or own_cores == 1.0
    assert replace(run, window={}).named("neighbour-cores").ceiling is None


ROW = st.tuples(st.sampled_from(["other", "optimizer", "forward", ""]), st.floats(0.01, 90.0))


@given(st.lists(ROW, max_size=8), st.lists(ROW, max_size=8), st.floats(0.1, 60.0), st.floats(0.1, 60.0))
def test_functions_take_no_more_than_their_phase_and_together_no_more_than_a_step(
    own: list[tuple[str, float]], calls: list[tuple[str, float]], other: float, in_profile: float
) -> None:
    step = profiled(*((phase, "/me/train.py", n, f"f{n}", ms) for n, (phase, ms) in enumerate(own)))
    step = replace(
        step,
        calls=[called(f"g{n}", "pandas", ms, f"f{n}", phase) for n, (phase, ms) in enumerate(calls)],
        phases={name: round(in_profile * MS) for name in ("other", "optimizer", "forward")},
    )
    run = script(phases={**HEALTHY, "other": other}, functions=step)
    view = View(run.snapshot())
    for rows in (view.functions, view.calls):
        assert sum(row.share for row in rows) <= 1 + 1e-6
        for phase in ("other", "optimizer", "forward"):
            spent = sum(row.ns for row in rows if row.phase == phase)
            assert spent <= view.cost(phase).ns * (1 + 1e-6)
    for found in run.found():
        assert found.ceiling is None or found.ceiling <= 1 / max(1 - (found.share or 0.0), 0.01) + 1e-6


def test_of_a_profiled_evaluation_the_parts_add_up_to_no_more_than_the_whole() -> None:
    rows = [["/me/train.py", 9, "evaluate", 1, 900 * MS, 900 * MS, "", "other"]]
    inside = FunctionsEvent(
        100, 1000 * MS, rows, calls=[called("torch.cat", "torch", 800)], inside="evaluate"
    )
    view = View(script(after={5: [inside]}).snapshot())
    assert sum(call.share for call in view.called_in("evaluate")) == pytest.approx(1.0)


@pytest.mark.parametrize(("function", "library", "named"), [("sum", "", False), ("sum", "numpy", True)])
def test_what_only_drives_a_generator_is_not_what_an_evaluation_spends_its_time_in(
    function: str, library: str, named: bool
) -> None:
    inside = FunctionsEvent(100, 1000 * MS, [], calls=[called(function, library, 500)], inside="evaluate")
    after = {n: [*evaluated(600, 20 * n + 20), *([inside] if n == 5 else [])] for n in range(12)}
    found = script(after=after).named("evaluation")
    assert ("sum" in found.title) == named
    assert any("once for the whole evaluation" in change.text for change in found.changes) == named


@pytest.mark.parametrize(
    ("name", "needed"), [("CartPoleEnv.step", True), ("Game.reset", True), ("Trainer.step", False)]
)
def test_a_step_of_an_environment_is_not_advised_away(name: str, needed: bool) -> None:
    run = calling(8.0, functions=profiled(("other", "/me/rl.py", 7, name, 7.4))).named("slow-function")
    assert ("several environments" in run.changes[0].text) == needed
    assert ("cache" in run.changes[0].text) != needed


def test_a_phase_in_bursts_is_compared_with_the_others() -> None:
    """A rollout before each sixteen short updates: no other phase takes a fifth of all medians."""
    snapshot = calling(8.0, called("Categorical.log_prob", "torch", 0.2)).snapshot()
    short = {"forward": 0.05, "backward": 0.14, "optimizer": 0.14, "other": 0.6}
    phases = tuple(
        replace(phase, p50_ns=round(short.get(phase.name, 0.03) * MS),
                host_ns=round((4.0 if phase.name == "other" else short.get(phase.name, 0.03)) * MS))
        for phase in snapshot.phases
    )  # fmt: skip
    assert View(replace(snapshot, phases=phases)).stretched("other") < 1.5


def test_derivatives_within_a_loss_are_no_code_outside_the_model() -> None:
    assert "user-code" not in calling(8.0, called("grad", "torch", 7.5, calls=36)).causes()
    assert "user-code" in calling(8.0, called("linspace", "torch", 7.5, calls=36)).causes()


@pytest.mark.parametrize(
    ("name", "advice"), [("LBFGS", "history_size"), ("Adagrad", "larger effective batch")]
)
def test_advice_about_an_optimizer_is_one_that_it_can_take(name: str, advice: str) -> None:
    run = script(phases=healthy(optimizer=20.0))
    run.run["config"]["optimizer"] = {"name": name}  # type: ignore[index]
    assert advice in run.named("optimizer").changes[-1].text


def test_what_a_gradient_scaler_unscales_is_no_clipping() -> None:
    scaled = script(phases=healthy(clip=8.0), window={"loss_scale": 65536.0})
    assert "clip" not in scaled.causes()
    assert (
        "clip" in script(phases=healthy(clip=8.0), window={"loss_scale": 65536.0, "grad_norm": 3.5}).causes()
    )


def test_clipping_in_a_script_tells_the_norm_without_a_limit_that_is_unknown() -> None:
    found = script(phases=healthy(clip=8.0), window={"grad_norm": 3.5}).named("clip")
    assert next(item.text for item in found.evidence if "norm" in item.text).endswith(" 3.50")


def test_time_that_comes_at_once_between_steps_is_not_that_of_a_call_in_a_usual_step() -> None:
    """A rollout before each sixteen updates: the profiled step is an update."""

    def told(median_ms: float, everywhere: float = 1.0, compiling: float = 0.0) -> Finding | None:
        snapshot = calling(8.0, called("Categorical.log_prob", "torch", 1.5)).snapshot()
        totals = replace(snapshot.totals, recompile_ns=round(compiling * snapshot.totals.wall_ns))
        medians = {"other": median_ms * MS}
        phases = [
            replace(phase, p50_ns=round(medians.get(phase.name, phase.host_ns / everywhere)))
            for phase in snapshot.phases
        ]
        found = diagnose(replace(snapshot, phases=tuple(phases), totals=totals))
        return next((item for item in found if item.cause == "user-code"), None)

    rare, usual, busy = told(1.0), told(7.0), told(1.0, everywhere=4.0)
    assert rare is not None and usual is not None and busy is not None
    assert "log_prob" not in rare.title and "groups" in rare.changes[0].text
    # A rollout needs the newest weights.
    assert "while" not in rare.changes[0].text
    assert "log_prob" in usual.title and not usual.changes  # the loss needs it
    # On a busy machine, all phases take long now and then.
    assert not any("groups" in change.text for change in busy.changes)
    # What compiling a function again takes has a finding of its own.
    assert told(1.0, compiling=0.25) is None and told(7.0, compiling=0.25) is not None


def test_a_short_call_is_not_blamed_for_a_rollout_between_other_steps() -> None:
    """The profiled update prints for 0.9 ms; the rollout before each sixteen updates is in none of them."""

    def told(median_ms: float, everywhere: float = 1.0) -> str:
        step = replace(profiled(), calls=[called("print", "", 0.9)], phases={"other": MS})
        snapshot = script(phases=healthy(other=8.0), functions=step).snapshot()
        medians = {"other": median_ms * MS}
        phases = [
            replace(phase, p50_ns=round(medians.get(phase.name, phase.host_ns / everywhere)))
            for phase in snapshot.phases
        ]
        return diagnose(replace(snapshot, phases=tuple(phases)))[0].title

    assert "print" not in told(1.0)
    assert "print" in told(8.0)  # each step prints for as long
    assert "print" in told(1.0, everywhere=8.0)  # all that a step does takes longer: a busy machine


# Slow functions.


def tokenizing(own_ms: float, step_ms: float = 25.0, **phases_ms: float) -> FunctionsEvent:
    """A profiled step. phases_ms: its phases; the function belongs to the first one."""
    phase = next(iter(phases_ms), "")
    row = ["/home/me/train.py", 12, "tokenize", 3, round(own_ms * MS), round(own_ms * MS), "collate", phase]
    lengths = {name: round(ms * MS) for name, ms in phases_ms.items()}
    return FunctionsEvent(9, round(step_ms * MS), [row], [], lengths)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (tokenizing(5.0), 0.2),
        # Steps and phases that the profiler made slower are scaled: 25 ms, of which the loop outside the model takes 5.
        (tokenizing(10.0, step_ms=50.0), 0.2),
        (tokenizing(8.1, step_ms=29.0, other=9.0), 0.18),
        # It takes no longer than its phase does in a usual step, also where the profile has no length of it.
        (replace(tokenizing(9.0, other=9.0), phases={}), 0.2),
    ],
)
def test_a_slow_function_is_named_with_its_line_its_caller_and_its_share(
    step: FunctionsEvent, share: float
) -> None:
    found = script(functions=step, phases=healthy(other=5.0)).verdict()
    assert found.cause == "slow-function" and found.share == pytest.approx(share, abs=0.01)
    assert all(part in found.title for part in ("train.py:12", "tokenize", "collate"))
    assert script(functions=tokenizing(0.4)).causes() == ["healthy"]


@pytest.mark.parametrize("busy", [True, False])
def test_a_function_that_takes_a_usual_phase_is_not_outbid_by_bursts_of_other_programs(busy: bool) -> None:
    """A callback takes 3.5 of the 4 ms that a usual step spends outside the model; the mean is 8 ms.

    On an idle machine, something else of the script takes the rest.
    """
    step = tokenizing(3.5, other=4.0)
    snapshot = script(
        functions=step, phases=healthy(other=8.0), host=cores(2.0, 0.2 if busy else 1.9)
    ).snapshot()
    phases = [
        replace(one, p50_ns=4 * MS if one.name == "other" else int(one.host_ns)) for one in snapshot.phases
    ]
    found = [item.cause for item in diagnose(replace(snapshot, phases=tuple(phases)))]
    assert "slow-function" in found and ("user-code" in found) is not busy


def test_a_function_of_an_own_model_is_named_with_its_line() -> None:
    found = own(phases=healthy(forward=20.0), functions=OWN_LOOP).verdict()
    assert found.changes[0].where == "model.py:31 in penalty" and found.sets == ()


def test_time_outside_the_model_that_no_function_takes_is_named_by_stack_samples() -> None:
    stacks = StacksEvent(9, 40, [["other", "/home/me/train.py", 30, "log_norms", 30, 1]])
    for step in (tokenizing(0.5), tokenizing(0.5, other=8.0)):
        found = script(functions=step, phases=healthy(other=8.0), stacks=stacks).verdict()
        assert found.cause == "user-code" and found.changes[0].where == "train.py:30 in log_norms"


def test_a_slow_callback_of_an_own_workload_is_named_and_bounded_by_its_phase() -> None:
    # The profiler slows logging down from the usual 8 ms to 16.
    step = profiled(
        ("log", "my/model.py", 40, "log_norms", 15.0), ("forward", "my/model.py", 9, "f", 0.1),
        phases={"log": 16 * MS, "forward": 7 * MS},
    )  # fmt: skip
    run = Planted(workload="my.model:make", phases=healthy(log=8.0), functions=step)
    found = run.named("slow-function")
    assert found.share == pytest.approx(0.27, abs=0.01)
    assert found.changes[0].where == "model.py:40 in log_norms"
    # A built-in workload has no code to change.
    assert "slow-function" not in replace(run, workload="eeg").causes()
    # On a GPU, the function costs only as much as the GPU waits for it.
    device = {"forward": 10.0, "backward": 15.0, "log": 0.2}
    assert "slow-function" not in replace(run, device=device).causes()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("item", ".item()"),
        ("float", "float(tensor)"),
        ("to", '.to("cpu")'),
        ("synchronize", ".synchronize()"),
    ],
)
def test_calls_that_wait_for_a_gpu_are_told_as_they_are_written(what: str, call: str) -> None:
    step = FunctionsEvent(9, 20 * MS, [], [["/home/me/train.py", 40, "main", what, 3, 8 * MS]])
    phases = healthy(other=8.2)
    found = script(functions=step, phases=phases, device=phases).named("sync")
    assert "train.py:40" in found.title and call in found.changes[0].text
    assert any(call in item.text and "3 times" in item.text for item in found.evidence)


def test_a_setting_is_not_offered_for_collections_that_the_script_asks_for() -> None:
    wait = ["/home/me/train.py", 20, "main", "collect", 1, 8 * MS]
    asked = FunctionsEvent(9, 28 * MS, [], [wait], {"other": 8 * MS})
    collecting = {"gc_ns": 160 * MS, "gc_count": 20, "gc_max_ns": 9 * MS}
    run = script(phases=healthy(other=8.2), window=collecting)
    found = replace(run, functions=asked).named("gc")
    assert not found.sets and found.changes[0].where == "train.py:20 in main"
    assert run.named("gc").sets[0].startswith("run.gc_every_steps=")
