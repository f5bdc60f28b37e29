"""Python processes of a script's own that need not import for seconds first: forks of one that has imported it all.

A script sees what it sees after `python script.py`: its arguments, standard streams, a main module that is its own, and
the interpreter's exit. Nothing else has run in its process, and no thread of Python's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["WarmProcess"]

_PROGRAM: Final = """
import json, os, runpy, sys
import torch, transformers, transformers.models.llama
import asyncllm.engine, asyncllm.model.open, asyncllm.text.load

print(flush=True)
for order in map(json.loads, iter(sys.stdin.readline, "")):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, (path, flags) in enumerate(zip(order["streams"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
        os.dup2(os.open(path, flags), number)
    os.environ.update(order["environment"])
    sys.stdin = open(0, closefd=False)
    sys.argv = order["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    break
"""


class WarmProcess:
    """The process that scripts fork from.

    Args:
        scratch: a folder of its own, for scripts and what they print.
        cwd: where scripts run.
    """

    def __init__(self, scratch: Path, cwd: Path) -> None:
        self._scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._read_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(
        self, script: Path | str, *arguments: str | Path, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, a file or its text, to its end."""
        if isinstance(script, str):
            (self._scratch / "script.py").write_text(script, encoding="utf-8")
            script = self._scratch / "script.py"
        streams = [self._scratch / name for name in ("stdin", "stdout", "stderr")]
        for stream, text in zip(streams, (stdin, "", ""), strict=True):
            stream.write_text(text, encoding="utf-8")
        argv = [str(script), *map(str, arguments)]
        order = {"argv": argv, "streams": [str(path) for path in streams], "environment": dict(environment or {})}
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        status = int(self._read_line())
        out, err = (path.read_text(encoding="utf-8") for path in streams[1:])
        return subprocess.CompletedProcess(argv, status, out, err)

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that scripts fork from has ended"
        return line
