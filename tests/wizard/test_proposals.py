"""What the wizard proposes: batches, models, placement, threads, ranks and strategy, and in which order."""

from __future__ import annotations

import re
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
import tomli
from situations import BASE, HOST, KEPT_BYTES, MODEL, OPENED, situation

from ndd_console.words.wizard import threads_line
from ndd_engine.child import Json
from ndd_engine.config import Config, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import equal_gpus
from ndd_engine.hardware.gpus import Gpu, Machine
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import Family, ItemCounts, Memory, StepTime, TimedBatch, Trace
from ndd_engine.predict.probe_process import Probed, other_is_faster
from ndd_engine.wizard import planner as planner_module
from ndd_engine.wizard.planner import Planner, ProbedModel, Situation, proposals, tier_of, unprobed_present
from ndd_engine.wizard.proposals import (
    KEEPABLE,
    MOST_MICROS,
    Answers,
    Batch,
    Layout,
    Model,
    Proposal,
    batches,
    longest_sequence,
    models,
    ranks_to_propose,
    sequences,
    worth_a_row,
)
from ndd_engine.wizard.ranking import cost_in_words, handful, pareto, ranked
from ndd_engine.wizard.session import ProposalSet, reasons, to_verify, written


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", *sets], "chartext").resolve()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("RTX 4080 SUPER", "NVIDIA GeForce RTX 4080 SUPER"),
        ("rtx-4080-super", "NVIDIA GeForce RTX 4080 SUPER"),
        ("h200", "NVIDIA H200"),
        ("RTX 4070", "NVIDIA GeForce RTX 4070"),
        ("4070 laptop", "NVIDIA GeForce RTX 4070 Laptop GPU"),
        ("NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti"),
    ],
)
def test_a_gpu_is_found_by_its_common_names(wanted: str, found: str) -> None:
    assert gpu_named(wanted).name.startswith(found)
    if found == "NVIDIA GeForce RTX 4070":
        assert "Laptop" not in gpu_named(wanted).name


def test_a_gpu_without_a_profile_is_given_by_its_figures() -> None:
    found = gpu_named("memory=24, bandwidth=936,sms=82,l2=6,fp32=35.6,bf16=71.2")
    assert (found.memory_gb, found.bandwidth_gb_s, found.sms, found.l2_mb) == (24, 936, 82, 6)
    assert dict(found.dense_tflops) == {"fp32": 35.6, "bf16": 71.2}
    for text, words in (
        ("memory=24,bandwidth=936", "sms, l2, fp32 missing"),
        ("memory=24,speed=2", "speed: unknown figure; allowed: memory"),
        ("memory=24GB", "memory=24GB: not a number"),
        ("memory=-1", "more than 0"),
        ("memory=nan", "more than 0"),
    ):
        with pytest.raises(UsageError, match=words):
            gpu_named(text)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ("RTX 2080", "2080 Ti"),  # another model of the same number
        ("4070", "4070 Laptop"),
        ("RTX 3080", "RTX 3080"),  # there are two
        ("Voodoo 2", "RTX 3080"),
        ("", "name is empty; allowed: .*RTX 3080.*memory=24"),
        (" ", "name is empty"),
    ],
)
def test_unknown_or_ambiguous_gpus_are_rejected_with_the_known_names(wanted: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        gpu_named(wanted)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (Answers(goal="time"), "--items N"),
        (Answers(goal="fast"), "throughput, low-memory, reproducible, time"),  # type: ignore[arg-type]
        (Answers(items=0), "1 or more"),
        (Answers(effective_batch=-3), "1 or more"),
        (Answers(min_sequence=1), "2 to 64"),
        (Answers(min_sequence=65), "2 to 64"),
        (Answers(reserve_bytes=-1), "0 or more"),
        (Answers(budget_memory="8 apples"), "a size such as 8GB"),
        (Answers(budget_memory="auto"), "a size such as 8GB"),
        (Answers(sizes=("tiny", "huge")), "tiny, mini"),
        (Answers(gpu="Voodoo"), "no profile"),
        (Answers(keep=("colour",)), "batch, sequence, size"),
        (Answers(keep=("size",), sizes=("tiny",)), "cannot be combined"),
    ],
)
def test_invalid_answers_are_rejected_with_the_allowed_values(answers: Answers, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answers.checked(64, ("tiny", "mini"))


def test_sequences_are_halved_down_to_the_minimum() -> None:
    assert longest_sequence(read(None, [], "chartext")) == 256  # of guide
    assert longest_sequence(read(None, ["workload.size=tiny"], "chartext")) == 64
    assert sequences(256, None) == [256]
    assert sequences(256, 64) == [256, 128, 64]
    assert sequences(256, 100) == [256, 128, 100]
    assert sequences(256, 2) == [256, 128, 64, 32, 2]


def test_accumulation_keeps_the_effective_batch() -> None:
    found = batches(config(), 96, 10_000)
    assert found[-1] == Batch(96, 1)
    assert all(batch.items == 96 for batch in found)
    assert {batch.micro for batch in found} == {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96}
    assert [batch.micro for batch in batches(config(), 96, 20)][-1] == 16


def test_a_free_batch_grows_in_even_steps() -> None:
    found = batches(config("batch.micro=20"), None, 100)
    assert all(batch.accumulation == 1 for batch in found)
    assert [batch.micro for batch in found][-3:] == [48, 64, 96]
    assert 20 in [batch.micro for batch in found]


def kept(found: list[Batch], most: int, now: int = 16, free: bool = False) -> list[int]:
    return [batch.micro for batch in worth_a_row(found, now, lambda micro: micro <= most, free)]


def test_small_micro_batches_are_shown_if_larger_ones_do_not_fit() -> None:
    found = batches(config(), None, 10_000)
    assert kept(found, 40) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    everything = kept(found, 10_000)
    assert everything[0] == 2 and everything[-1] == 4096 and 16 in everything
    assert len(everything) <= MOST_MICROS + 1
    assert kept(found, 1) == [2, 3]  # nothing fits: the two smallest


@pytest.mark.parametrize("most", [40, 90, 127, 1000, 2500])
def test_a_free_batch_gets_close_to_the_memory_limit(most: int) -> None:
    fitting = [micro for micro in kept(batches(config(), None, 10_000), most, free=True) if micro <= most]
    assert most - 8 < fitting[-1] <= most


def test_the_pareto_front_of_many_rows() -> None:
    rows = [
        replace(BASE, batch=Batch(micro, 1), memory_bytes=micro % 97, step_s=1 + (micro * 31) % 89)
        for micro in range(1, 400)
    ]

    def dominated(one: Proposal) -> bool:
        mine = (-(one.memory_bytes or 0), one.items_per_s or 0)
        others = [(-(row.memory_bytes or 0), row.items_per_s or 0) for row in rows]
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)

    assert pareto(rows) == [one for one in rows if not dominated(one)]


def test_the_configured_model_comes_first() -> None:
    found = models(config(), Answers(min_sequence=16), ["mini", "tiny"], ["off", "bf16"])
    assert found[0] == Model("tiny", 64, "off")
    assert len(found) == 2 * 3 * 2
    for model in found:
        resolved = config(*model.sets())
        assert (resolved.workload.size, resolved.batch.sequence) == (model.size, model.sequence)


def test_a_larger_batch_is_recommended_only_while_it_pays() -> None:
    def row(micro: int, rate: float, range_s: tuple[float, float] | None = None) -> Proposal:
        step_s = micro / rate
        return replace(
            BASE, batch=Batch(micro, 1), step_s=step_s, batch_times=micro / 16, memory_bytes=micro,
            step_range_s=range_s,
        )  # fmt: skip

    # From 64 on, all are within 5 % of the fastest.
    rows = [row(32, 800), row(64, 970), row(128, 990), row(256, 1000)]
    assert ranked(rows, Answers())[0].batch.micro == 64
    # One that keeps the effective batch at that speed comes first.
    assert ranked([*rows, row(16, 960)], Answers())[0].batch.micro == 16
    # On a slow host, 64 is far slower.
    slow = [row(64, 970, (0.05, 0.2)), row(256, 1000, (0.2, 0.4))]
    assert ranked(slow, Answers())[0].batch.micro == 256


def test_a_larger_batch_has_to_leave_enough_steps_an_epoch() -> None:
    def row(micro: int, items: int) -> Proposal:
        return replace(
            BASE, batch=Batch(micro, 1), step_s=0.1 + micro / 1e5, batch_times=micro / 32, memory_bytes=1,
            steps_per_epoch=items // micro,
        )  # fmt: skip

    micros = (16, 32, 64, 256, 1024)
    # The largest batch is the fastest, but of little data it has one step an epoch.
    assert ranked([row(micro, 1_000_000) for micro in micros], Answers())[0].batch.micro == 1024
    assert ranked([row(micro, 1200) for micro in micros], Answers())[0].batch.micro == 32
    assert ranked([row(1024, 1200)], Answers())  # nothing else is within the limits


@pytest.mark.parametrize(("memory_gb", "hidden"), [(8.0, 224), (12.0, 256)])
def test_size_auto_is_probed_as_it_trains_on_a_gpu_with_this_memory(memory_gb: float, hidden: int) -> None:
    draft = read(None, ["run.device=cpu"], "summarise")
    trains = draft.resolve("guide", memory_gb)
    wanted = models(
        trains, Answers(), ["guide"], ["off"], ["narrow", "guide"], tier=tier_of(draft, "guide", memory_gb)
    )
    sizes = [
        read(None, ["run.device=cpu", *model.sets()], "summarise").resolve().workload for model in wanted
    ]
    assert sizes[0] == trains.workload and sizes[0].hidden == hidden
    # Half of its sequence is the same model, and the size beside is as always.
    assert [one.hidden for one in sizes] == [hidden, hidden, 192]


def test_a_handful_differs_in_what_matters() -> None:
    now, half, large = Model("tiny", 64, "off"), Model("tiny", 32, "bf16"), Model("mini", 64, "bf16")

    def rows(model: Model, rate: float, alternative: bool) -> list[Proposal]:
        return [
            replace(
                BASE, model=model, batch=Batch(micro, 16 // micro), step_s=16 / rate * (1 + 1 / micro),
                memory_bytes=20 * micro, alternative=alternative, parameters=5000 if model is large else 1000,
            )
            for micro in (1, 2, 4, 8, 16)
        ]  # fmt: skip

    every = [*rows(now, 100, False), *rows(half, 300, True), *rows(large, 50, True)]
    found = handful(every, Answers())
    assert ranked(every, Answers())[0].key == found[0].key and found[0].model == now
    # One row of each alternative, after those of the configured model, although one of them is faster.
    assert [one.model for one in found if one.alternative] == [half, large]
    assert len(found) <= 6
    assert not any(one.alternative for one in ranked(every, Answers()))
    # A size that was asked for has its row, also where it does not fit.
    tight = [replace(one, free_bytes=10) if one.model is large else one for one in every]
    assert [one.batch.micro for one in handful(tight, Answers()) if one.model == large] == [1]


def test_the_default_shows_half_the_sequence_and_the_sizes_beside() -> None:
    known = ("tiny", "mini", "small")
    wide = config("workload.size=mini")
    found = models(wide, Answers(), ["mini"], ["off", "bf16"], known, "bf16")
    now = [Model("mini", 128, "off"), Model("mini", 128, "bf16")]
    beside = [Model("mini", 64, "bf16"), Model("tiny", 128, "bf16"), Model("small", 128, "bf16")]
    assert found == [*now, *beside]
    assert models(wide, Answers(keep=("sequence",)), ["mini"], ["off", "bf16"], known, "bf16") == [
        *now,
        *beside[1:],
    ]
    assert models(wide, Answers(keep=("size",)), ["mini"], ["off", "bf16"], known, "bf16") == [
        *now,
        beside[0],
    ]


def test_the_goal_determines_the_order() -> None:
    lean = replace(BASE, step_s=0.12, memory_bytes=50)
    slow = replace(BASE, step_s=0.5, memory_bytes=10)
    late = replace(BASE, step_s=0.05, setup_s=100.0, memory_bytes=300)
    rows = [slow, BASE, lean, late]
    assert ranked(rows, Answers(goal="throughput"))[0] is late
    assert ranked(rows, Answers(goal="time", items=1600))[0] is BASE
    assert ranked([slow, BASE, lean], Answers(goal="low-memory"))[0] is lean
    assert ranked([slow, BASE, lean], Answers(goal="low-memory"))[-1] is slow


def test_costs_are_described() -> None:
    words = cost_in_words(
        config(), "character", ("tiny", 64), Model("mini", 32, "bf16"), Batch(8, 1), (1000, 25_000)
    )
    assert all(part in words for part in ("32", "64", "8", "16", "bf16"))
    assert cost_in_words(config(), None, ("tiny", 64), Model("tiny", 64, "off"), Batch(16, 1), (1, 1)) == ""


# Placement, threads and precisions.


def probed_model() -> ProbedModel:
    """1 MiB and 2 ms per item; half of the time is loading data."""
    trace = Trace(((0, 8 * MIB), (0, -1)))
    family = Family((4, 8), trace, ((0.0, float(MIB)),), aligned=True)
    points = tuple(TimedBatch(micro, micro * 1e-3, micro * 1e-4, micro * 1e-3) for micro in (4, 8))
    return ProbedModel(
        MODEL, 1000, 64.0, Memory(family, "gpu", 0, "test"), StepTime(points, 0.0, on_gpu=False)
    )


@pytest.mark.parametrize(("normalises", "least"), [(False, 1), (True, 2)])
def test_a_single_item_is_proposed_where_two_do_not_fit(normalises: bool, least: int) -> None:
    trace = Trace(((0, 8 * MIB), (0, -1)))
    large = Family((4, 8), trace, ((0.0, 600.0 * MIB),), aligned=True)
    found = replace(probed_model(), memory=Memory(large, "gpu", 0, "test"))
    there = situation(opened=replace(OPENED, normalises=normalises))
    rows = [one for one in proposals(there, Answers(), found) if one.placement == "host"]
    assert min(one.batch.micro for one in rows) == least
    # With the configured effective batch.
    items = there.config.items_per_step
    assert (Batch(1, items) in [one.batch for one in rows if one.fits]) is not normalises


def test_data_on_the_gpu_costs_memory_and_saves_time() -> None:
    rows = proposals(situation(), Answers(), probed_model())
    places = {place: [one for one in rows if one.placement == place] for place in ("host", "device")}
    assert len(places["host"]) == len(places["device"]) > 1
    for host, device in zip(places["host"], places["device"], strict=True):
        assert host.batch == device.batch and host.key != device.key
        assert device.memory_bytes == host.memory_bytes + KEPT_BYTES
        assert device.step_s < host.step_s
        assert "loader.placement=device" in device.sets()
        assert device.total_s < host.total_s


@pytest.mark.parametrize(
    "there",
    [
        situation(opened=replace(OPENED, items=ItemCounts(None, gathers=False))),
        situation("loader.workers=2"),
        situation(gpu=None),
    ],
    ids=["every epoch has other data", "loader workers", "no GPU"],
)
def test_what_cannot_be_kept_on_a_gpu_stays_on_the_host(there: Situation) -> None:
    assert {one.placement for one in proposals(there, Answers(), probed_model())} == {"host"}


def test_a_sequence_chosen_for_the_memory_of_a_gpu_is_no_alternative() -> None:
    # The probes opened the size with its usual sequence.
    there = situation(opened=replace(OPENED, sequence=128))
    rows = proposals(there, Answers(), probed_model())
    assert not any(one.alternative or "context" in one.cost for one in rows)


def test_peaks_of_a_long_trace_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {(one.batch, one.placement): one for one in proposals(situation(), Answers(), probed_model())}
    monkeypatch.setattr(planner_module, "LONG_TRACE", 0)
    for one in proposals(situation(), Answers(), probed_model()):
        same = exact[one.batch, one.placement]
        # The allocator asks for up to 20 MiB at a time.
        assert one.memory_bytes == pytest.approx(same.memory_bytes, abs=20 * MIB) and one.fits == same.fits


def test_cached_items_count_where_they_are_stored() -> None:
    tensors, encoded = (ItemCounts(KEPT_BYTES, gathers=gathers) for gathers in (True, False))
    changing = ItemCounts(None, gathers=False)
    assert tensors.loader_bytes(on_gpu=True, placement="device", cache=False) == KEPT_BYTES
    assert tensors.loader_bytes(on_gpu=True, placement="host", cache=True) == 0
    assert tensors.loader_bytes(on_gpu=False, placement="host", cache=True) == 0  # already in host memory
    assert encoded.loader_bytes(on_gpu=False, placement="host", cache=True) == KEPT_BYTES
    assert encoded.loader_bytes(on_gpu=False, placement="host", cache=False) == 0
    assert changing.loader_bytes(on_gpu=True, placement="device", cache=True) == 0


def test_chosen_threads_are_written_with_a_reason() -> None:
    there = situation(gpu=None, opened=replace(OPENED, chosen_threads=1))
    one = proposals(there, Answers(), probed_model())[0]
    assert "run.threads=1" in one.sets()
    assert reasons(there, one)["run.threads"]
    usual = situation(gpu=None)
    assert "run.threads" not in reasons(usual, proposals(usual, Answers(), probed_model())[0])


FASTER = replace(OPENED, threads=1, faster=True, by_threads=[(2, 0.02), (1, 0.01)])
AS_FAST = replace(OPENED, threads=2, by_threads=[(2, 0.01), (1, 0.0098)])


def test_threads_that_are_faster_are_proposed_beside_the_present_configuration() -> None:
    there = situation(gpu=None, opened=FASTER)
    rows = proposals(there, Answers(), probed_model())
    assert {one.threads for one in rows} == {1} and not any(one.present for one in rows)
    reason = reasons(there, rows[0])["run.threads"]
    assert re.findall(r"[0-9]+ (?:ms|threads?)", reason) == ["20 ms", "2 threads", "10 ms", "1 thread"]
    sized = Answers(sets=("workload.size=tiny",))
    present = unprobed_present(there, sized, rows)
    assert present is not None and present.threads is None and present.given == () and present.allowed
    # Their rates are shown in what the workload calls its items and tokens.
    assert {(one.item, one.token) for one in (*rows, present)} == {("segment", "character")}
    # Another model or batch than any of the rows is outside the limits.
    outside = unprobed_present(there, sized, ())
    assert outside is not None and not outside.allowed


def test_threads_that_are_as_fast_are_not_proposed() -> None:
    there = situation(gpu=None, opened=AS_FAST)
    rows = proposals(there, Answers(), probed_model())
    assert {one.threads for one in rows} == {None} and any(one.present for one in rows)
    assert "run.threads" not in reasons(there, rows[0])


def test_the_wizard_says_with_how_many_threads_it_measured() -> None:
    (line,) = threads_line(situation(gpu=None, opened=FASTER))
    assert re.findall("[0-9]+", line) == ["1", "20", "2", "10", "1", "1"]
    assert threads_line(situation(opened=FASTER)) == ()  # for another GPU


@pytest.mark.parametrize(
    ("present", "other", "faster"),
    [
        ([2.0, 2.1, 2.0], [1.0, 1.1, 1.0], True),
        ([2.0, 2.1, 2.0], [1.0, 1.9, 1.0], False),  # one turn is as slow
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], False),
        ([], [], False),
    ],
)
def test_another_number_of_threads_has_to_be_faster_in_every_turn(
    present: list[float], other: list[float], faster: bool
) -> None:
    assert other_is_faster(present, other) is faster


def test_bf16_is_probed_if_the_cpu_supports_it() -> None:
    def amps(units: tuple[str, ...]) -> tuple[str, ...]:
        machine = Machine((), None, "cpu", {}, replace(HOST, bf16_units=units))
        planner = Planner(Answers(workload="chartext"), lambda *_: None, threading.Event())
        return planner._amps(None, machine, situation(gpu=None).config, OPENED)[0]

    assert amps(()) == ("off",)
    assert amps(("amx_bf16",)) == ("off", "bf16")


@pytest.mark.parametrize(("name", "found"), [("T4", ("off", "fp16")), ("H200", ("off", "bf16"))])
def test_a_gpu_is_probed_with_the_dtypes_it_supports(name: str, found: tuple[str, ...]) -> None:
    planner = Planner(Answers(workload="chartext"), lambda *_: None, threading.Event())
    machine = Machine((), None, "cpu", {}, HOST)
    amps, notes = planner._amps(gpu_named(name), machine, situation().config, OPENED)
    assert amps == found
    assert bool(notes) == (found[1] == "fp16")
    # NVML does not list it, torch trains on it.
    there = replace(OPENED, device="cuda:0", device_name=f"NVIDIA {name}")
    assert planner._amps(None, machine, situation().config, there)[0] == found


def test_for_another_gpu_nothing_of_this_host_is_written() -> None:
    there = situation(opened=replace(OPENED, chosen_threads=1))
    one = proposals(there, Answers(), probed_model())[0]
    assert one.threads is None and one.setup_s == 0


def test_what_fits_only_with_retries_is_marked_and_comes_last() -> None:
    # Per item 60 MiB, freed before 61 MiB are allocated: 9 items need more than the memory, unless it is released.
    trace = Trace(((0, 0), (0, -1), (1, 0), (1, -1)))
    family = Family((4, 8), trace, ((0.0, 60.0 * MIB), (0.0, 61.0 * MIB)), aligned=True)
    points = tuple(TimedBatch(micro, 1e-3, 1e-4, 1e-3) for micro in (4, 8))
    probed = ProbedModel(
        MODEL, 1000, 64.0, Memory(family, "gpu", 0, "test"), StepTime(points, 0.0, on_gpu=True)
    )
    answers = Answers()
    rows = [one for one in proposals(situation(), answers, probed) if one.placement == "host"]
    retried = [one for one in rows if one.retries]
    assert {one.batch.micro for one in retried} and all(one.fits for one in retried)
    assert all(one.batch.micro * 121 > 1000 >= one.batch.micro * 61 for one in retried)
    assert all(one.to_dict()["retries"] for one in retried)
    order = ranked(rows, answers)
    assert order[0].retries == 0 and order[-1].retries


# Ranks and strategy, for machines with 1, 2, 4 and 8 GPUs.


ON_GPU = replace(OPENED, device="cuda:0", device_name="Test GPU", train_items=6400)


def gpus_of(*names: str, free_mib: int = 1000) -> Machine:
    """GPUs of these names; each has 10 MiB less free than the one before."""
    gpus = tuple(
        Gpu(place, place, f"GPU-{place}", name, 2000 * MIB, (9, 0), free_bytes=(free_mib - 10 * place) * MIB)
        for place, name in enumerate(names)
    )
    return Machine(gpus, gpus[0] if gpus else None, "cuda:0" if gpus else "cpu", {}, HOST)


def memory(fixed_mib: int, mib_per_item: int) -> Memory:
    trace = Trace(((0, 0), (1, 0)))
    lines = (float(fixed_mib * MIB), 0.0), (0.0, float(mib_per_item * MIB))
    return Memory(Family((4, 8), trace, lines, aligned=True), "gpu", 0, "test")


def proposed(
    gpus: Machine, whole_mib: int, *sets: str, answers: Answers | None = None
) -> tuple[ProposalSet, list[Layout], Answers]:
    """The proposals for a machine whose probes find a model of this size, 10 MiB per item; the layouts probed."""
    kept = Answers(workload="chartext", sets=("workload.size=tiny", "run.device=cpu", *sets), keep=KEEPABLE)
    answers = answers or kept
    probed: list[Layout] = []

    def ask(command: Json) -> Json:
        # Only what was chosen has to be read back.
        config = read(None, [*answers.all_sets, *command["sets"]], "chartext").resolve()
        layout = Layout(config.parallel.ranks, config.parallel.strategy)
        probed.append(layout)
        share = layout.ranks if layout.strategy == "fsdp2" else 1
        points = tuple(TimedBatch(micro, micro * 1e-3, 1e-4, 0.0) for micro in (4, 8))
        budget = config.memory.budget
        found = Probed(
            1000, 64.0, memory(whole_mib // share, 2 if budget else 10), StepTime(points, 0.0, on_gpu=True),
            recomputes="3 of 4 blocks compute again" if budget else "",
        )  # fmt: skip
        return {"probed": asdict(found)}

    planner = Planner(answers, lambda *_: None, threading.Event())
    planner._ask = ask  # type: ignore[method-assign]
    base = situation(*sets, opened=ON_GPU, gpu=None)
    ranks = ranks_to_propose(answers, base.config, gpus, None, ON_GPU)
    free = gpus.free_bytes or 0
    there: Situation = replace(
        base, free_bytes=free, ranks=ranks.count, ranks_why=ranks.why, rank_bytes=ranks.free_bytes or free,
        notes=tuple(ranks.notes),
    )  # fmt: skip
    found = tuple(planner.probe(there))
    rows = tuple(row for one in found for row in proposals(there, answers, one))
    return ProposalSet(there, found, rows), probed, answers


def best(found: ProposalSet, answers: Answers) -> Proposal:
    return found.ranked(answers)[0]


def test_one_gpu_changes_nothing() -> None:
    found, probed, answers = proposed(gpus_of("A"), 100)
    assert probed == [Layout()]
    assert found.situation.ranks == 1 and not found.situation.notes
    assert {one.layout for one in found.rows} == {Layout()}
    assert to_verify(found, answers)
    assert "parallel" not in written(answers, found.situation, best(found, answers))


@pytest.mark.parametrize("whole_mib", [100, 900])
def test_a_batch_that_does_not_fit_has_a_row_with_blocks_that_compute_again(whole_mib: int) -> None:
    """16 items take 160 MiB of 1,000, and 32 MiB where blocks compute again."""
    found, probed, answers = proposed(gpus_of("A"), whole_mib)
    again = [one for one in found.rows if one.model.recomputes and one.placement == "host"]
    assert len(probed) == (2 if again else 1) and bool(again) == (whole_mib == 900)
    for one in again:
        assert one.fits and "3 of 4 blocks" in one.cost
    if again:
        whole = next(one for one in again if one.batch.micro == 16)
        text = written(answers, found.situation, whole)
        assert tomli.loads(text)["memory"] == {"budget": f"{found.situation.free_bytes // 10**6}MB"}
        assert any(one.model.recomputes for one in handful(found.rows, answers))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_each_gpu_gets_a_rank_with_the_whole_model_where_it_fits(count: int) -> None:
    found, probed, answers = proposed(gpus_of(*["A"] * count), 100)
    assert probed == [Layout(), Layout(count)]  # nothing has to be sharded
    one = best(found, answers)
    assert one.layout == Layout(count)
    assert one.batch.items * count == 16  # the effective batch of the configuration is held
    assert one.free_bytes == (1000 - 10 * (count - 1)) * MIB  # of the fullest GPU
    text = written(answers, found.situation, one)
    assert tomli.loads(text)["parallel"] == {"ranks": count, "strategy": "ddp"}
    assert f"{one.batch.micro} x {one.batch.accumulation} x {count}" in text
    assert found.situation.notes
    assert not to_verify(found, answers)  # a measurement has one rank


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_model_that_does_not_fit_a_gpu_is_sharded(count: int) -> None:
    found, probed, answers = proposed(gpus_of(*["A"] * count), 1200)
    assert probed == [Layout(), Layout(count), Layout(count, "fsdp2")]
    one = best(found, answers)
    assert one.layout == Layout(count, "fsdp2") and one.fits
    assert all(not row.fits for row in found.rows if row.layout != one.layout)
    text = written(answers, found.situation, one)
    assert tomli.loads(text)["parallel"]["strategy"] == "fsdp2"
    assert "1.2 GiB" in text  # what each rank needs with the whole model
    document = one.to_dict()
    assert (document["ranks"], document["strategy"]) == (count, "fsdp2")
    assert f"parallel.ranks={count}" in document["set"]


def test_only_what_does_not_fit_is_sharded() -> None:
    # 900 MiB and 10 per item: with DDP 2 to 4 items fit, 8 of 16 on two ranks do not.
    found, _, _ = proposed(gpus_of("A", "A"), 940)
    micros = {
        strategy: {one.batch.micro for one in found.rows if one.layout == Layout(2, strategy) and one.fits}
        for strategy in ("ddp", "fsdp2")
    }
    assert micros == {"ddp": {2, 4}, "fsdp2": {8}}


def test_ranks_are_as_many_as_the_effective_batch_is_divisible_by() -> None:
    sets = "batch.micro=6", "batch.accumulation=1"
    found, probed, answers = proposed(gpus_of(*["A"] * 4), 100, *sets)
    assert found.situation.ranks == 3 and probed[-1] == Layout(3)
    assert any(note.startswith("3 of 4") for note in found.situation.notes)
    assert best(found, answers).batch.items == 2


def test_a_batch_set_as_effective_is_probed_and_written() -> None:
    found, _, answers = proposed(gpus_of("A", "A"), 100, "batch.effective=24", "batch.micro=8")
    assert all(not one.why for one in found.found)
    assert best(found, answers).batch.items == 12


def test_configured_ranks_are_kept_and_asked_ones_come_first() -> None:
    configured, probed, _ = proposed(gpus_of("A", "A"), 100, "parallel.ranks=4", "batch.micro=4")
    assert configured.situation.ranks == 4 and probed == [Layout(4)]
    assert [one for one in configured.rows if one.present and one.layout == Layout(4)]
    answers = Answers(
        workload="chartext", sets=("workload.size=tiny", "run.device=cpu"), ranks=2, keep=KEEPABLE
    )
    found, _, _ = proposed(gpus_of("A"), 100, answers=answers)
    assert found.situation.ranks == 2 and found.situation.ranks_why == "2 ranks on A"
    alone, _, _ = proposed(gpus_of("A", "A"), 100, answers=replace(answers, ranks=1))
    assert alone.situation.ranks == 1


def test_gpus_of_another_name_and_other_devices_are_left_out() -> None:
    assert len(equal_gpus(gpus_of("A", "A", "B", "A"))) == 2
    assert len(equal_gpus(gpus_of("A"))) == 1
    second = gpus_of("A", "A")
    assert equal_gpus(replace(second, chosen=second.gpus[1], device="cuda:1")) == []
    assert equal_gpus(gpus_of()) == []


def test_what_several_ranks_cannot_train_is_planned_for_one() -> None:
    own = replace(ON_GPU, not_shared="own step")
    answers: Any = Answers(workload="chartext")
    found = ranks_to_propose(answers, situation(gpu=None).config, gpus_of("A", "A"), None, own)
    assert found.count == 1 and "own step" in found.notes[0]
