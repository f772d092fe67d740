"""Configurations: files and --set with damaged syntax, wrong values, and values at and beyond every limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from ndd_engine.config import Config, read, to_toml
from ndd_engine.config.workload_sections import WORKLOADS
from ndd_engine.errors import EXIT_USAGE, ConfigError
from ndd_engine.train.request import preflight
from qa.console import sets_of
from qa.hostile._ended import clean, said
from qa.hostile.attempts import Attempt, Kind

# More than this is no longer a message.
LONGEST_LINE = 1500
LONGEST_LIST = 60

WRONG_VALUES = (
    "", "nan", "inf", "-inf", "true", "none", "[]", "{}", "[[[]]]", "{a.b = 1}", "0", "-1", "0.5", "1e300",
    "1e-300", "-1e300",
    "1e999",
    "9" * 5000, "0x" + "f" * 5000, "-" + "9" * 300, "9" * 300, str(2**63), str(2**63 - 1), str(-(2**63) - 1),
    "0b" + "1" * 70, '"' + "a" * 100_000 + '"', '"\\u0000"', '"\\u001b]0;title\\u0007"', '"\\uFFFE"',
    "'\u202e'",
    '"~nobody-at-all/x"', '"/dev/zero"', '"/proc/self/mem"', '"' + "../" * 3000 + '"', '"' + "x" * 300 + '"',
    "[" * 3000, "[" * 500 + "]" * 500, "{a=" * 400 + "1" + "}" * 400, "1979-05-27T07:32:00Z", "07:32:00",
    "[1, \"a\", {}]",
    "[" + "1," * 20_000 + "]", '"""' + "\n" * 5000 + '"""', '"auto"', '"cuda:99999999999999999999"', '"cpu "',
    '"CPU"',
    '"json:loads"', '"os:system"', '":"', '"a:b:c"', '"no.such.module:factory"', '"chartext\\u0000"',
    "[1e400]", "[-0.0, 1.0]",
    "10**9", "1_000_000_000_000", "1_000_000_000_001", "0.1e1", "3.0", "\"3\"", "+3", "03", "1__0",
    "\U0001f600",
)  # fmt: skip
WRONG_KEYS = (
    "", "a", "run", "batch.micro.x", "x" * 5000, '"\\u001b[2J"', '""', "a." * 2000 + "b", "a" * 70, "micro ",
    "Micro", "épochs",
    '"\x7f"', "workload", "__class__", "model_fields", "workload.options." + "k." * 60 + "z", "batch.items",
    "0", "-", '"a b"',
)  # fmt: skip
WRONG_LINES = (
    "[", "]", "[[run]]", "[run", "=", "a", "a =", "= 1", "\x00", "\ufeff", "[run.batch]",
    "[" + " " * 20_000, "[" + "a" * 20_000,
    "[workload.options]", "[[workload.options]]", "run = 3", "run.epochs = 3", '"""', "'''",
    "#" * 50_000, "\r", "\x1b[31m",
    "[a]\n" * 2000, "extends = \"/dev/zero\"", "extends = []", "extends = 1e400", "extends = \"\"",
    "extends = \"~nobody-at-all/x\"", "extends = \"" + "../" * 3000 + "\"", "extends = \"" + "x" * 300_000 + "\"",
    "extends = \"\\u001b[2J\"", "extends = \"hostile.toml\"", "extends = \".\"", "extends = \"/proc/self/mem\"",
    "[extends]", "[[extends]]", "extends.a = 1",
    "\n".join(f"k{index} = 1" for index in range(3000)),
)  # fmt: skip


def _valid_files() -> list[str]:
    texts = [to_toml(read(sets=("run.epochs=1",), workload=name).resolve()) for name in WORKLOADS]
    texts.append(
        '[run]\nepochs = 2\n[workload]\nname = "my_module:factory"\npath = ["."]\n[workload.options]\nwidth = 3\n'
        'rates = [0.1, 0.2]\nnested = {a = 1, b = {c = "x"}}\n'
    )
    texts.append('[run]\nmax_steps = 10\npreset = "fastest"\n[batch]\neffective = 64\nmicro = 8\n')
    return texts


def _keys() -> list[str]:
    return [
        f"{section}.{key}"
        for name in WORKLOADS
        for section, values in read(sets=("run.epochs=1",), workload=name).resolve().model_dump().items()
        for key in values
    ]


def _damaged(rng: Random, text: str) -> str:
    """The text after one to four edits."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(lines))
        edit = rng.randrange(9)
        key, equals, _ = lines[where].partition(" = ")
        if edit <= 2 and equals:
            lines[where] = f"{key} = {rng.choice(WRONG_VALUES)}"
        elif edit == 3 and equals:
            lines[where] = f"{rng.choice(WRONG_KEYS)} = 1"
        elif edit == 4:
            lines.insert(where, rng.choice(WRONG_LINES))
        elif edit == 5:
            lines.insert(where, rng.choice(lines))
        elif edit == 6 and lines[where]:
            at = rng.randrange(len(lines[where]))
            odd = rng.choice((0, 9, 27, 34, 35, 61, 91, 127, 0x85, 0x202E, 0xD7FF))
            lines[where] = lines[where][:at] + chr(odd)
        elif edit == 7:
            lines = lines[: max(where, 1)]
        else:
            other = rng.randrange(len(lines))
            lines[where], lines[other] = lines[other], lines[where]
    return "\n".join(lines)


def _held(config: Config) -> None:
    written = config.model_dump()
    again = read(Path("again.toml"), text=to_toml(config)).resolve().model_dump()
    # TOML cannot unset the default; all that a size stands for is written.
    if written["workload"]["size"] is None:
        del again["workload"]["size"], written["workload"]["size"]
    assert again == written, "the written TOML reads back as another configuration"


def _refused(error: ConfigError) -> None:
    lines = str(error).splitlines()
    assert error.exit_status == EXIT_USAGE
    assert lines, "an error without a message"
    assert len(lines) <= LONGEST_LIST, f"{len(lines)} lines"
    clean(str(error))
    for line in lines:
        assert len(line) <= LONGEST_LINE, f"a line of {len(line):,} characters: {line[:200]}"


def _check(text: str | None, sets: tuple[str, ...], workload: str | None) -> None:
    try:
        draft = read(None if text is None else Path("hostile.toml"), sets, workload, text=text)
        config = draft.resolve()
        _held(config)
        preflight(draft, use_torch=False)
    except ConfigError as error:
        _refused(error)


def _command(file: Path, content: bytes, sets: tuple[str, ...]) -> None:
    file.write_bytes(content)
    # Without steps to train: whatever is valid ends here as well.
    found = said("train", "--headless", str(file), *sets_of(*sets), "--set", "run.epochs=0")
    found.check(EXIT_USAGE)
    assert found.errors, "no message"


def attempts(rng: Random, folder: Path) -> Iterator[Attempt]:
    """Endless: nine of ten in the functions that every command calls, the tenth by the command line."""
    files, keys = _valid_files(), _keys()
    while True:
        text: str | None = _damaged(rng, rng.choice(files)) if rng.random() < 0.7 else None
        sets = tuple(
            f"{rng.choice(keys) if rng.random() < 0.8 else rng.choice(WRONG_KEYS)}="
            f"{rng.choice(WRONG_VALUES) if rng.random() < 0.9 else rng.choice(WRONG_LINES)}"
            for _ in range(rng.randint(0 if text is not None else 1, 3))
        )
        workload = rng.choice((None, *WORKLOADS, *WORKLOADS, "a:b", "", ":", "\x1b[2J", "x" * 300))
        shown = f"{text if text is None else text[:300]!r} {[item[:100] for item in sets]} {workload!r}"
        if rng.random() < 0.1 and text is not None:
            content = bytearray(text.encode())
            for _ in range(rng.randint(0, 3) if content else 0):
                content[rng.randrange(len(content))] = rng.randrange(256)
            sets = tuple(item for item in sets if "\x00" not in item)  # no argument contains one
            file = folder / "hostile.toml"
            yield Attempt(
                shown, lambda content=bytes(content), sets=sets, file=file: _command(file, content, sets)
            )
        else:
            yield Attempt(shown, lambda text=text, sets=sets, workload=workload: _check(text, sets, workload))


KIND = Kind(
    "configurations", "valid and reads back equal, or clear errors with exit status 2", 20_000, 150, attempts
)
