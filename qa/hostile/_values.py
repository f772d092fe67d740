"""Values and lines that no reader of a record or a message expects."""

from __future__ import annotations

import json

NASTY = "\x1b[31m\x07\r\n\u202e\u200b漢字\x00"
# What no reader expects; each as JSON text, since a value such as a number of 400 digits is one.
VALUES = (
    "null", "true", "false", "0", "-1", "1", "7.5", "-0.0", "1e-320", "1e99", "-1e99",
    "200000000000", "1e308", "-1e308", "1e999", "NaN", "-Infinity",
    str(2**63 - 1), str(2**63), str(-(2**63)), "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000,
    '""', '"x"', '"1"', '"nan"',
    '"' + "x" * 10_000 + '"', json.dumps(NASTY), '"\\ud800"', '"[bold]markup[/bold]</script>"', '"cuda:0"', '"cpu"',
    "[]", "{}", "[null]", "[[]]", "[1]", '["x","y","z"]', "[1,2,3,4,5,6]", '{"":1}', '{"a":{"b":null}}',
    "[" * 60 + "]" * 60, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000,
)  # fmt: skip
NONSENSE = (
    b"", b"   ", b"null", b"3", b"[]", b"{}", b'"x"', b"\x00" * 500, b"\xff\xfe", b"\xc3(", b"[" * 100_000,
    b'{"a":' * 100_000, b"1" * 5000, b'{"v":1}', b'{"v":1,"type":"future","t":1.0}', b'{"v":1,"type":["mark"],"t":1.0}',
    b'{"v":1,"type":"mark","t":"x"}', b'{"v":1,"type":"fold","t":1.0,"state":{}}', b'{"v":1,"type":"fold","t":1.0}',
    b'{"v":1,"type":"window","t":1e400}', b"x" * 300_000, b'{"v":1,"type":"stage","t":5,"name":"a","text":"b"',
)  # fmt: skip
