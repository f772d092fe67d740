"""Every way to start a script: each process that trains has a record, and no other process does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from observed import SUBJECTS, Ran, run

from ndd_watch import SITE

pytestmark = pytest.mark.long

LOOP = """
import sys
sys.path.insert(0, {subjects!r})
from common import *
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        x = torch.full((8,), index / 40)
        return x, x.sum(0, keepdim=True)

def main():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    context = {context!r}
    loader = DataLoader(Slow(), batch_size=4, num_workers=2 if context else 0, multiprocessing_context=context or None)
    for x, y in loader:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
    report(10, loss)

if __name__ == "__main__":
    main()
"""


def loop(context: str = "") -> str:
    return LOOP.format(subjects=str(SUBJECTS), context=context)


def is_observed(ran: Ran, processes: int = 1) -> None:
    assert ran.status == 0, ran.errors
    assert len(ran.records) == processes, list(ran.records)
    for name in ran.records:
        assert ran.of("end", name)[0]["step"] == int(ran.word("STEPS"))


def test_a_module(tmp_path: Path) -> None:
    is_observed(run(tmp_path, "-m", "plain"))


def test_code_and_standard_input(tmp_path: Path) -> None:
    is_observed(run(tmp_path / "code", "-c", loop()))
    is_observed(run(tmp_path / "input", "-", stdin=loop()))


def test_a_shell_script(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"set -e\necho begins\nexec {sys.executable} plain.py\n")
    is_observed(run(tmp_path, str(script), program=("bash",)))


def test_a_console_script(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(SUBJECTS)!r})\nimport plain\n"
    )
    script.chmod(0o755)
    is_observed(run(tmp_path, program=(str(script),)))


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loader_workers_leave_no_record(tmp_path: Path, context: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(loop(context))
    is_observed(run(tmp_path, str(script)))


def test_the_site_customization_of_the_user_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    ran = run(tmp_path, "plain.py", PYTHONPATH=f"{SITE}:{tmp_path}")
    assert ran.out.startswith("theirs\n")
    is_observed(ran)


def test_nothing_of_ours_is_on_the_path(tmp_path: Path) -> None:
    found = "[p for p in sys.path if 'ndd' in p], [m for m in sys.modules if m.startswith('ndd')]"
    code = f"import sys, torch; print({found})"
    # What is installed in the environment of the script is there without us as well.
    before = run(tmp_path, "-c", code, observed=False).out
    assert run(tmp_path, "-c", code).out == before and before.rstrip().endswith("[]")


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_isolated_interpreter_is_not_observed(tmp_path: Path, flag: str) -> None:
    ran = run(tmp_path, flag, "-c", "print('runs')")
    assert ran.status == 0 and ran.out == "runs\n" and not ran.records
