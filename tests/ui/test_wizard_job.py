"""The wizard's questions and answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ndd_console.jobs import wizard
from ndd_console.jobs.wizard import WizardJob, live_run_notes
from ndd_console.render.text import lines
from ndd_engine.wizard.proposals import Answers, gpu_named, usable_bytes
from tests.waiting import until


def job(**options: object) -> WizardJob:
    made = WizardJob(Answers(workload="chartext", **options), None, 10.0)  # type: ignore[arg-type]
    assert made.workloads()[0].name == "chartext"
    made.choose(0)
    return made


def value(made: WizardJob, name: str) -> str:
    return next(field.value for field in made.fields() if field.name == name)


def press(made: WizardJob, name: str, by: int = 1) -> str:
    place = next(index for index, field in enumerate(made.fields()) if field.name == name)
    return made.change(place, by)


def test_the_data_of_the_chosen_workload_is_described() -> None:
    made = WizardJob(Answers(), None, 10.0)
    names = [row.name for row in made.workloads()]
    assert set(names) == {"eeg", "chartext", "antispoof", "finetune", "summarise"}
    assert "windows" in " ".join(made.choose(names.index("eeg")))
    assert made.answers.workload == "eeg" and not made.problem()


def test_the_goal_time_asks_for_the_number_of_items() -> None:
    made = job()
    assert [field.name for field in made.fields()][:2] == ["goal", "effective batch"]
    while value(made, "goal") != "shortest total time":
        press(made, "goal")
    before = made.answers.items
    assert before and not press(made, "number of items")
    assert made.answers.items == 2 * before
    press(made, "number of items", -1)
    assert made.answers.items == before
    press(made, "effective batch")
    assert made.answers.items == before  # a different question
    press(made, "goal")
    assert made.answers.items is None  # another goal needs none


def test_choices_wrap_around() -> None:
    made = job()
    first = {field.name: field.value for field in made.fields()}
    for name in ("effective batch", "minimum sequence", "model sizes"):
        seen = {value(made, name)}
        for _ in range(20):
            assert press(made, name) == ""
            seen.add(value(made, name))
            if value(made, name) == first[name]:
                break
        else:
            raise AssertionError(f"{name} never comes back to {first[name]}")
        assert len(seen) > 2
        press(made, name, -1)
        assert value(made, name) != first[name]


def test_an_invalid_file_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "mine.toml"
    broken.write_text("[batch]\nmicro = 0\n")
    made = WizardJob(Answers(config=broken), broken, 10.0)
    assert made.workloads()[0].name == str(broken)
    assert made.choose(0) == ()
    assert "batch.micro" in made.problem()


@pytest.mark.parametrize(
    ("runs", "words"),
    [([], ""), (["a-001"], "live run a-001:"), (["a-001", "b-002"], "live runs a-001, b-002:")],
)
def test_live_runs_are_mentioned(
    runs: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SimpleNamespace(name=name, live_owner=lambda: 1) for name in runs]
    ended = SimpleNamespace(name="ended", live_owner=lambda: None)
    monkeypatch.setattr(wizard, "all_runs", lambda root: [*found, ended])
    assert words in (told := " ".join(live_run_notes(tmp_path))) and "ended" not in told
    assert "a-001" not in " ".join(live_run_notes(tmp_path, "a-001"))


@pytest.mark.long
def test_another_workload_resets_its_answers() -> None:
    made = job(sizes=("mini",), min_sequence=32, effective_batch=64)
    names = [row.name for row in made.workloads()]
    made.choose(names.index("chartext"))
    assert (made.answers.sizes, made.answers.min_sequence, made.answers.effective_batch) == (
        ("mini",),
        32,
        64,
    )
    made.choose(names.index("summarise"))
    assert made.answers.workload == "summarise" and not made.problem()
    assert (made.answers.sizes, made.answers.min_sequence, made.answers.effective_batch) == ((), None, None)


def test_the_effective_batch_is_limited_by_the_data() -> None:
    made = job(sets=("workload.size=tiny", "batch.sequence=64", "batch.micro=2000"))  # of 6,903 windows
    seen = set()
    for _ in range(6):
        press(made, "effective batch")
        seen.add(value(made, "effective batch"))
    assert seen == {"2000", "4000", "any"}


def test_a_gpu_that_is_not_in_this_machine_is_shown_from_the_first_page_on() -> None:
    made = WizardJob(Answers(workload="chartext", gpu="RTX 4080 SUPER"), None, 10.0)
    until(lambda: made.machine is not None)
    text = "\n".join(lines(made.machine or []))
    assert "RTX 4080 SUPER" in text and "14.6 GiB usable" in text and "nothing is" in text
    made.choose([row.name for row in made.workloads()].index("chartext"))
    press(made, "reserved memory")
    press(made, "reserved memory")
    assert made.answers.reserve_bytes == int(0.2 * usable_bytes(gpu_named("RTX 4080 SUPER")))
