"""Programs that a model wrote, run against a problem's tests (HumanEval, arXiv 2107.03374), in a process of their own.

The process has limits of time, memory and file size, a folder that is deleted, and no way to start others or to delete
files by the usual names. It can write wherever its user can. That keeps a careless program from doing harm, not a
hostile one: whoever runs code of a model they do not trust uses a container.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

SECONDS = 10.0  # that a program may take
MEMORY = 4 << 30  # bytes of its address space
_FILE = 1 << 20  # bytes of a file that it writes
_FIELDS = ("task_id", "prompt", "entry_point", "test")
_BEGINS = re.compile(r"^(?:import|from|def|async def|class|@)\b", re.MULTILINE)  # the first line of a program
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_ENDS = re.compile(r"\n(?=[^\s#)\]}@])")  # a line that begins another statement behind a function's body
_FENCES = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
# What opens a block, of a line without blanks around it: no code between two fences
_OPENS = re.compile(r"^(```|~~~)`*[^`]*$|\s(```|~~~)[\w+-]*$|[^\s`~](```|~~~)[\w+-]+$")
_TRIED = 8  # ends of a block, beginnings and ends of a program that are tried
_HELPERS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What begins processes, ends those of others, or takes files away
_TAKEN = {
    "os": (
        *("fork", "forkpty", "kill", "killpg", "system", "popen", "posix_spawn", "posix_spawnp", "execv", "execve"),
        *("setsid", "setpgid", "setuid", "remove", "unlink", "rmdir", "removedirs", "rename", "renames", "replace"),
        *("truncate", "chmod", "chown", "link", "symlink"),
    ),
    "subprocess": ("Popen",),
    "shutil": ("rmtree", "move", "chown"),
}
_RUN = f"""
import resource, sys
pipe, token = int(sys.argv[1]), sys.stdin.readline()
program = sys.stdin.read()
for limit, most in (("AS", {MEMORY}), ("CPU", {int(SECONDS)}), ("FSIZE", {_FILE}), ("CORE", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
    except (ValueError, OSError):  # macOS has no limit of address space
        pass
import os, shutil, subprocess
write = os.write
for module, names in {_TAKEN!r}.items():
    for name in names:
        setattr(sys.modules[module], name, None)
sys.modules["resource"] = sys.modules["multiprocessing"] = None
import types
answer = sys.modules["answer"] = types.ModuleType("answer")
exec(compile(program, "<answer>", "exec"), vars(answer))
write(pipe, token.encode())
"""


@dataclass(frozen=True)
class Solves:
    """Whether an answer solves a problem: the function it defines passes `test`, which defines `check(candidate)`."""

    prompt: str
    entry_point: str
    test: str

    def __call__(self, answer: str) -> bool:
        return runs_through(self.program(answer))

    def program(self, answer: str) -> str:
        """The answer's function behind what stands before it in the prompt, and the tests."""
        before = self.prompt[: self.prompt.rfind(f"def {self.entry_point}")]
        whole = f"{before}\n{self._function(answer)}\n\n{self.test}\n\ncheck({self.entry_point})\n"
        return "".join(_FUTURE.findall(whole)) + _FUTURE.sub("", whole)  # these stand first

    def _function(self, answer: str) -> str:
        """The first fenced block that defines the function, behind imports and helpers of blocks before it; or the
        answer, from where code begins, if it defines it; else the first block, or the answer, continues the prompt,
        up to where the function's body ends."""
        defines = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(self.entry_point)}\b", re.MULTILINE)
        answer = answer.rpartition("</think>")[2]  # what it only thought of is no answer
        if re.match(r"\n*(  |\t)\s*[^\s`~]", answer):  # goes on with the body; fences behind it show something else
            return self.prompt + "\n" + _ENDS.split(_FENCES.split(answer, maxsplit=1)[0], maxsplit=1)[0]
        blocks = fenced_blocks(answer)
        before = list[str]()
        for block in blocks:
            code = textwrap.dedent(block)
            if defines.search(code):
                whole = code if _is_program(code) else _code_of(code, defines)  # cut off, perhaps
                return "\n".join([*before, whole])
            before += [code] if _helps(code) else []
        if defines.search(answer):
            return _code_of(answer, defines)
        return self.prompt + "\n" + _ENDS.split(blocks[0] if blocks else answer, maxsplit=1)[0]


def fenced_blocks(answer: str) -> list[str]:
    """What stands between fences of three backticks or tildes, the first of which may end a line of prose, and the last
    a line of code. A fence inside a program, as in a docstring, ends no block; one that nothing ends reaches to the
    end."""
    lines, blocks, at = answer.splitlines(keepends=True), list[str](), 0
    while at < len(lines):
        opened = _OPENS.search(lines[at].strip())
        at += 1
        if opened is None:
            continue
        mark = next(filter(None, opened.groups()))
        ends = [i for i in range(at, len(lines)) if lines[i].strip().startswith(mark)]
        glued = [i for i in range(at, len(lines)) if lines[i].rstrip().endswith(mark) and i not in ends]
        blocks_to = [(i, "".join(lines[at:i])) for i in ends[:_TRIED]]
        blocks_to += [(i, "".join(lines[at : i + 1]).rstrip().rstrip(mark)) for i in glued[:_TRIED]]
        blocks_to.append((len(lines), "".join(lines[at:])))
        end, block = next((found for found in blocks_to if _is_program(found[1])), blocks_to[0])
        blocks.append(block)
        at = end + 1
    return blocks


def _code_of(answer: str, defines: re.Pattern[str]) -> str:
    """The program in an answer without fences that defines what is asked for: from a line that begins one, up to where
    it still is one."""
    for begins in (0, *(match.start() for match in islice(_BEGINS.finditer(answer), _TRIED))):
        lines = answer[begins:].splitlines(keepends=True)
        for _ in range(_TRIED):
            try:
                ast.parse(textwrap.dedent(code := "".join(lines)))
            except SyntaxError as error:
                del lines[min(len(lines), error.lineno or len(lines)) - 1 :]
                continue
            except (ValueError, MemoryError, RecursionError):
                break
            if defines.search(code):
                return code
            break
    return answer


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(code))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_program(code: str) -> bool:
    return _parsed(code) is not None


def _helps(code: str) -> bool:
    """Whether it is a program that only defines: imports, functions, classes, and constants."""
    whole = _parsed(code)
    return whole is not None and all(
        isinstance(statement, _HELPERS)
        or (isinstance(statement, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(statement)))
        for statement in whole.body
    )


def runs_through(program: str) -> bool:
    """Whether a Python program reaches its end within the limits."""
    read, write = os.pipe()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended
                process.stdin.write(f"{token}\n{program}".encode(errors="replace"))
                process.stdin.close()
            # Not until it exits, which it may do late; what it started may hold the other end
            said = os.read(read, 64) if select.select([read], [], [], SECONDS)[0] else b""
            return said == f"{token}\n".encode()
        finally:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, as macOS says it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(read)


def is_problem(record: dict[str, Any]) -> bool:
    """Whether a record is a problem as HumanEval has them, which may lack the other fields."""
    return all(isinstance(record.get(name), str) for name in ("entry_point", "prompt"))


def check_of(record: dict[str, Any], place: str) -> Solves:
    """The check of a problem. Raises ValueError naming a field that it lacks."""
    if lacking := [name for name in _FIELDS if not isinstance(record.get(name), str) or not record[name].strip()]:
        raise ValueError(f"{place}: a problem without {' and '.join(lacking)}; HumanEval's have {', '.join(_FIELDS)}")
    if "def check(" not in record["test"]:
        raise ValueError(f"{place}: test defines no check(candidate), as HumanEval's do")
    if f"def {record['entry_point']}" not in record["prompt"]:
        raise ValueError(f"{place}: the prompt does not define entry_point={record['entry_point']!r}")
    return Solves(record["prompt"], record["entry_point"], record["test"])
