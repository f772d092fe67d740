"""The keys of all screens: tables behind the bindings, the footer, the command palette, the help page and the docs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a screen.

    names: as Textual writes them, separated by commas. action: the screen's method is `action_<action>`. word: in the
    footer and the command palette. help: on the help page and in the documentation. needs: what the key requires, see
    `NEEDS`. label: how the key is shown. drop: its place in the order in which a narrow footer drops keys; 0 for those
    that are dropped last, None for keys that are not in the footer. of_script: the help where the run is a script's.
    """

    names: str
    action: str
    word: str
    help: str = ""
    needs: tuple[str, ...] = ()
    label: str = ""
    drop: int | None = 0
    of_script: str = ""

    @property
    def shown(self) -> str:
        """The key as the user reads it."""
        return self.label or self.names.partition(",")[0]


# What a key requires -> why it does not work without it.
NEEDS: dict[str, str] = {
    "attached": "this run trains in this process: press q to stop it",
    "change": "no change can be tried on this run at present",
    "checkpoints": "of scripts, only those of Lightning and of Hugging Face's Trainer save a checkpoint on request",
    "choosing": "press t after the result to select another change",
    "command": "no finding proposes a change with a command",
    "commands": "this run takes no commands: it has ended or is stopping",
    "evaluations": "of scripts, only those of Hugging Face's Trainer with an eval_strategy evaluate on request",
    "existing file": "the file is new: there are no changes to show",
    "faster": "only a change that is faster and in effect is written, once",
    "file page": "this key works on the page of the file",
    "further page": "this is the last page: press w to write the file",
    "goal page": "this key works on the page of the goal",
    "a key": "this key has no effect here: ? lists the keys",
    "idle": "wait until the work has ended, or stop it with b",
    "marked": "mark a proposal first, with space",
    "measured": "there is no result yet",
    "more time": "more time is offered before a trial, and after an inconclusive result",
    "not opening": "a run is being opened: wait for its screen",
    "own settings": "a script makes its settings itself: ndd-console applies none",
    "proposal": "no proposed change is selected",
    "ranks": "this run has one rank",
    "run": "select a run first",
    "result": "there is no result to write, or it is written already",
    "search": "nothing is found yet: search for a text with /",
    "startable": "only configurations and workloads can be started; press enter to open a run",
    "table page": "this key works on the page of the trade-offs",
    "training": "the run is still being prepared",
    "training here": "a configuration cannot be trained from here",
    "values": "this run logs no values of its own",
    "wizard": "the wizard starts from a configuration or a workload, not from this entry",
    "workers": "this run has no loader workers, or they have not made a few batches yet",
}
_STEERED = ("commands", "training")

APP_KEYS = (
    Key("ctrl+p", "command_palette", "commands", "find a command of the screen by its name", label="Ctrl-P"),
    Key("ctrl+z", "suspend_process", "suspend", "suspend ndd-console and a run that trains in it; fg continues",
        label="Ctrl-Z"),
)  # fmt: skip
_HELP = Key("question_mark", "help", "help", "help: keys and glossary", label="?")


def _back(*more: str) -> Key:
    """The key that closes a page. more: the key that opened it."""
    return Key(",".join(("escape,q,ctrl+q,ctrl+c", *more)), "back", "back", "back", label="esc")


_BACK = _back()
LIVE_KEYS = (
    Key("t", "try", "try", "try a change: measure it against the current configuration", ("change",),
        of_script="try a change: measure it against the script as it is"),
    Key("d,enter", "diagnosis", "diagnosis", "diagnosis: all findings with their evidence"),
    Key("r", "ranks", "ranks", "ranks: work, waiting and phases of each, slowest first", ("ranks",)),
    Key("o", "workers", "workers", "loader workers: times, functions, slowest items, memory", ("workers",),
        drop=2),
    Key("w", "wizard", "wizard", "wizard: propose and measure configurations for this machine", ("wizard",), drop=5),
    Key("p", "pause", "pause", "pause or resume", _STEERED),
    Key("c", "checkpoint", "checkpoint", "save a checkpoint", (*_STEERED, "checkpoints")),
    Key("e", "evaluate", "evaluate", "evaluate", (*_STEERED, "evaluations"), drop=2),
    Key("k", "kernels", "profile", "profile a few steps: exact idle time and its causes", _STEERED, drop=4),
    Key("s", "stop", "stop", "stop an attached run", ("attached", "commands")),
    Key("v", "values", "values", "values that your own training code logs, and its samples", ("values",)),
    Key("y", "copy", "copy", "copy the command that measures the proposed change", ("command",), drop=1),
    Key("i", "settings", "settings", "settings and whether they are in effect; work per step",
        ("own settings",), drop=3),
    Key("l", "log", "log", "log: captured output (print, warnings)"),
    _HELP,
    Key("q,ctrl+q", "quit", "quit", "quit: stop after a checkpoint, or keep the run running",
        of_script="quit: end the script with Ctrl-C, or keep it running"),
    Key("ctrl+c", "interrupt", "stop", "stop after a checkpoint; again: stop immediately", label="Ctrl-C", drop=None,
        of_script="end the script with Ctrl-C; again: kill it"),
)  # fmt: skip
PAGE_KEYS = (_HELP, _BACK)
SETTINGS_KEYS, VALUES_KEYS, RANKS_KEYS, COMPARISON_KEYS, WORKERS_KEYS = (
    (_HELP, _back(opened_by)) for opened_by in "ivrco"
)
HELP_KEYS = (_back("question_mark", "h"),)
DIAGNOSIS_KEYS = (
    Key("t", "try", "try", "try one of the proposed changes", ("change",)),
    Key("y", "copy", "copy", "copy the command that measures the first proposed change", ("command",)),
    _HELP,
    _back("d"),
)
START_KEYS = (
    Key("s", "start", "start", "train what the page shows"),
    Key("w", "wizard", "wizard", "wizard for it", ("wizard",)),
    _HELP,
    _BACK,
)
LOG_KEYS = (
    Key("slash", "search", "search", "search for a text", label="/"),
    Key("n", "older", "older match", "the match before", ("search",)),
    Key("N,upper_n", "newer", "newer match", "the match after", ("search",), label="N"),
    _HELP,
    _back("l"),
)
HOME_KEYS = (
    Key("enter", "open", "open", "open: a run, or what an entry would train", ("not opening",)),
    Key("s", "start", "start", "start the selected configuration or workload", ("not opening", "startable")),
    Key("w", "wizard", "wizard", "wizard for the selected configuration or workload",
        ("not opening", "wizard")),
    Key("x", "report", "report", "write the selected run as an HTML page, report.html in its folder", ("run",)),
    Key("c", "compare", "compare", "compare with another run: press c on each of the two", ("run",)),
    Key("r", "reload", "refresh", "read the folder and the runs again"),
    _HELP,
    Key("escape", "close_message", "close message", drop=None),
    Key("q,ctrl+q,ctrl+c", "quit", "quit", "quit", ("not opening",)),
)  # fmt: skip
TRIAL_KEYS = (
    Key("enter", "measure", "measure", "measure the selected change", ("choosing",)),
    Key("e", "edit", "edit", "edit the selected change", ("choosing", "proposal")),
    Key("tab,up", "switch", "own change", "switch between the proposed changes and your own", ("choosing",)),
    Key("m,ctrl+t", "longer", "more time", "measure for longer", ("more time",)),
    Key("w", "write", "write the configuration", "write the change of the trial to a new file", ("faster",)),
    Key("y", "copy", "copy the diff", "copy the diff of the trial", ("measured",)),
    Key("t", "again", "try another", "select another change", ("measured",)),
    _HELP,
    _BACK,
)
TUNING_KEYS = (
    Key("w", "write", "write the configuration", "write the settings that help to a new file", ("result",)),
    _HELP,
    _BACK,
)
WIZARD_KEYS = (
    Key("enter", "next", "next", "next page; on the trade-offs: file of the selected row", ("idle", "further page")),
    Key("v", "measure", "measure", "measure the marked rows and the present configuration", ("table page", "marked")),
    Key("space", "mark", "mark", "trade-offs: mark a row (✔) for measurement", ("table page",)),
    Key("s", "sort", "sort", "trade-offs: sort by the next column, marked with ▾", ("table page",)),
    Key("p", "plot", "plot", "trade-offs: plot memory against speed, or show more rows", ("table page",)),
    Key("right,l,plus", "more", "change", "goal: the next or previous answer", ("goal page",), "←→"),
    Key("left,h,minus", "less", "previous answer", "", ("goal page",), "←", drop=None),
    Key("w", "write", "write", "write the file; a new name unless one was given", ("file page",)),
    Key("t", "train", "write and train", "write the file, close the wizard and train", ("file page", "training here")),
    Key("d", "diff", "changes", "file: changes to an existing file, or the whole file", ("file page", "existing file")),
    Key("b,escape,backspace", "back", "back", "back; while work is running: stop it"),
    _HELP,
    Key("q,ctrl+q,ctrl+c", "close", "close", "close; cancels running work"),
)  # fmt: skip
# Keys inside lists and pages, and of questions.
SCROLL_KEYS = (
    Key("up", "scroll_up", "scroll", "one line up or down", label="↑↓"),
    Key("down", "scroll_down", "one line down", label="↓", drop=None),
    Key("space,pagedown", "page_down", "next page", "next page", label="space"),
    Key("pageup", "page_up", "page before", drop=None),
    Key("home,g", "scroll_home", "top", "top", label="g", drop=1),
    Key("end,G,upper_g", "scroll_end", "bottom", "bottom", label="G", drop=2),
)
LIST_KEYS = (
    Key("up,k", "cursor_up", "select", label="↑↓"),
    Key("down,j", "cursor_down", "next entry", label="↓", drop=None),
)
TABLE_KEYS = (*LIST_KEYS, Key("home", "scroll_top", "first row"), Key("end", "scroll_bottom", "last row"))
# Of a table that is wider than the screen.
SIDEWAYS_KEY = Key("right,left", "cursor_right", "columns", "more columns of the table", label="←→")
# The tables of the documentation: name -> keys.
TABLES: dict[str, tuple[Key, ...]] = {
    "live": (*LIVE_KEYS, *APP_KEYS),
    "home": HOME_KEYS,
    "diagnosis": DIAGNOSIS_KEYS,
    "page": (*SCROLL_KEYS, *PAGE_KEYS),
    "log": LOG_KEYS,
    "trial": TRIAL_KEYS,
    "tuning": TUNING_KEYS,
    "wizard": WIZARD_KEYS,
}
