"""A logger in a process of its own: what it imports, prints, uploads or breaks stays outside of training.

The parent writes lines of JSON to the standard input of the child: {"open": …}, {"add": [t, step, values]}, {"close":
status}. The child answers on a pipe with {"error": text} or {"done": true}. Neither side imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ndd_engine.errors import said, shortened
from ndd_engine.record.events import RunEvent

from .scalars import LoggerError

# Seconds that the end of a run waits for a logger, for example until everything is uploaded.
PATIENCE_S = 30.0
# Seconds after which a logger that takes no more values is given up.
HANG_S = 120.0
# Seconds that a logger without its run may still need.
ORPHAN_S = 60
_MOST_ANSWER = 65536  # bytes


class ProcessSink:
    """A sink whose logger runs in a child process, started by `open`.

    kind: "wandb" or "mlflow". folder: for the logger's files and the id of its run. settings: see logger_sinks.
    """

    def __init__(self, kind: str, name: str, folder: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._kind, self._folder, self._settings = kind, folder, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1

    def prepare(self) -> None:
        pass  # the child imports everything

    def open(self, run: RunEvent) -> None:
        self._folder.mkdir(exist_ok=True)
        source, target = os.pipe()
        try:
            with (self._folder / f"{self._kind}.log").open("ab") as log:
                package = str(Path(__file__).parents[2])
                paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
                self._process = subprocess.Popen(
                    # -P: a file of the working folder must not shadow a module of the logger.
                    [sys.executable, "-P", "-m", __name__, self._kind, str(target)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(target,),
                    env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,  # Ctrl-C and a lost terminal are for the run
                )  # fmt: skip
        except BaseException:
            os.close(source)
            raise
        finally:
            os.close(target)
        self._answers = source
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        about = {
            "name": run.name, "workload": run.workload, "config": run.config, "resumed_step": run.resumed_step,
            "device": run.device_name, "host": run.host, "versions": run.versions, "parameters": run.parameters,
            "model": run.model, "data": run.data,
        }  # fmt: skip
        self._send({"open": about, "settings": self._settings, "folder": str(self._folder)})

    def add(self, t: float, step: int, values: dict[str, float]) -> None:
        self._send({"add": [t, step, values]})

    def close(self, status: str | None) -> None:
        try:
            if self._process is not None and self._process.stdin is not None:
                self._send({"close": status})
                self._process.stdin.close()
                self._wait()
        finally:
            self.abandon()

    def abandon(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    def _send(self, body: dict[str, Any]) -> None:
        """Write a line. Raises LoggerError if the child ended, or takes nothing for HANG_S."""
        assert self._process is not None and self._process.stdin is not None
        handle = self._process.stdin.fileno()
        data = memoryview(json.dumps(body).encode() + b"\n")
        while data:
            poll = select.poll()
            poll.register(handle, select.POLLOUT)
            if not poll.poll(HANG_S * 1000):
                raise LoggerError(f"it has taken no values for {HANG_S:.0f} s")
            try:
                data = data[os.write(handle, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._wait()
                raise LoggerError("its process ended early") from None

    def _wait(self) -> None:
        """Wait for the end of the child. Raises LoggerError with what it reported, or how it ended."""
        assert self._process is not None
        answer = self._answer(time.monotonic() + PATIENCE_S)
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            status = 0  # it has said that it is done
        if "error" in answer:
            raise LoggerError(shortened(str(answer["error"])))
        if "done" not in answer:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            raise LoggerError(f"its process ended early ({how}; see {self._folder.name}/{self._kind}.log)")

    def _answer(self, deadline: float) -> dict[str, Any]:
        """The last answer of the child; {} if it ended without one. Raises LoggerError after the deadline."""
        text = b""
        try:
            while len(text) < _MOST_ANSWER:
                ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
                if not ready:
                    raise LoggerError(f"it has not finished within {PATIENCE_S:.0f} s after the run")
                part = os.read(self._answers, 4096)
                if not part:
                    break
                text += part
        finally:
            os.close(self._answers)
        lines = text.splitlines()
        try:
            found = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


# The child's end.


def main(kind: str, target: int) -> NoReturn:
    """Serve one logger until its standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends; its end closes the pipe
    os.set_inheritable(target, False)
    answer: dict[str, Any] = {"done": True}
    try:
        _serve(kind)
    except BaseException as error:  # noqa: BLE001  also what a package does with sys.exit
        import traceback

        traceback.print_exc()
        answer = {"error": said(error)}
    with contextlib.suppress(OSError):
        os.write(target, json.dumps(answer).encode() + b"\n")
        os.close(target)
    sys.stderr.flush()
    os._exit(0)  # without the exit handlers of a package, which may wait for a server


def _serve(kind: str) -> None:
    sinks = importlib.import_module("ndd_engine.train.logger_sinks")
    sink: Any = None
    status: str | None = "lost"  # unless a line says otherwise
    try:
        for line in sys.stdin.buffer:
            body = json.loads(line)
            if "open" in body:
                sink = sinks.SINKS[kind](Path(body["folder"]), body["settings"])
                sink.open(body["open"])
            elif "add" in body:
                sink.add(*body["add"])
            else:
                status = body["close"]
                break
    finally:
        signal.alarm(ORPHAN_S)  # ends the process, if a package hangs and nobody waits any more
        if sink is not None:
            sink.close(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
