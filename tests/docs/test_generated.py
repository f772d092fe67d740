"""The generated parts of the documentation: they are up to date and contain everything that the code defines."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from ndd_engine.config.schema import Config
from ndd_engine.config.workload_sections import SECTIONS
from ndd_engine.diagnose import CAUSES
from ndd_engine.record.events import EVENT_TYPES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_tables_are_up_to_date(hooks: ModuleType) -> None:
    outdated = [path.name for path, committed, generated in hooks.pages() if committed != generated]
    assert not outdated, f"{outdated} differ from the code; run: python docs/hooks.py --write"


def test_an_outdated_page_is_listed_and_updated(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "steps.md"
    page.write_text("before\n\n<!-- generated: phases -->\nold\n<!-- end -->\n\nafter\n")
    monkeypatch.setattr(hooks, "__file__", str(tmp_path / "hooks.py"))
    assert hooks.main([]) == 1
    assert "old" in page.read_text() and "steps.md" in capsys.readouterr().out
    assert hooks.main(["--write"]) == 0
    before, _, rest = page.read_text().partition("\n\n<!-- generated: phases -->\n\n")
    table, _, after = rest.partition("\n\n<!-- end -->\n\n")
    assert (before, after) == ("before", "after\n") and "old" not in table and "`backward`" in table
    assert hooks.main([]) == 0


def test_a_block_without_its_end_is_reported(hooks: ModuleType) -> None:
    block = "<!-- generated: phases -->\n"
    for page in (block, f"{block}{block}<!-- end -->\n"):
        with pytest.raises(ValueError, match="no <!-- end -->"):
            hooks.filled(page)


def test_every_key_of_the_configuration_is_listed_with_its_description() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    sections = {name: field.annotation for name, field in Config.model_fields.items() if name != "workload"}
    for section, model in (*sections.items(), *(("workload", model) for model in SECTIONS.values())):
        for name, field in model.model_fields.items():
            row = f"| `{section}.{name}` | "
            assert row in page
            assert name == "name" or field.description, f"{section}.{name} has no description"
            assert (field.description or "").replace("|", "\\|") in page
    types = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert types["speed.attention"] == '`"auto"`, `"flash"`, `"efficient"`, `"cudnn"`, `"math"`'
    assert types["run.epochs"] == "integer ≥ 1 and ≤ 1,000,000,000" and "any" not in types.values()


def test_every_field_of_every_event_has_a_meaning_of_its_own() -> None:
    page = (DOCS / "record-format.md").read_text("utf-8")
    for name, kind in EVENT_TYPES.items():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        meanings = []
        for item in fields(kind):
            row = re.search(rf"^\| `{item.name}` \|.*\|$", section, re.MULTILINE)
            assert row is not None, f"{name}.{item.name}"
            meanings.append(row[0].split("|")[-2].strip())
            assert meanings[-1], f"{name}.{item.name} has no meaning"
        assert len(set(meanings)) == len(meanings), f"two fields of {name} have the same meaning"


def test_no_meaning_is_left_over(hooks: ModuleType) -> None:
    unexplained = {}
    for name, kind in EVENT_TYPES.items():
        names = [item.name for item in fields(kind)]
        unexplained[name] = set(names) - set(hooks.explained(inspect.getdoc(kind) or "", names)[1])
    unexplained["any"] = set().union(
        *(names - set(hooks.MEANINGS.get(event, ())) for event, names in unexplained.items())
    )
    for event, meanings in hooks.MEANINGS.items():
        assert set(meanings) <= unexplained[event], event


def test_every_cause_is_explained(hooks: ModuleType) -> None:
    page = (DOCS / "diagnosis.md").read_text("utf-8")
    for cause, title in CAUSES.items():
        section = page.split(f"\n### {cause}\n")[1].split("\n### ")[0]
        assert f"*{title}*" in section
        if cause not in ("too-short", "healthy"):
            assert all(f"**{word}**" in section for word in ("Means", "Evidence", "Fix")), cause
    with pytest.raises(ValueError, match="few-workers"):
        hooks.with_titles("### healthy\n")
