"""The shape of the code itself: who imports whom, what an import does, and that the documents keep up."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "asyncllm"

# Each module belongs to one part. A part is named by its modules, or by the folder that holds them.
PARTS: Final = {
    "values": {
        "errors",
        "outputs",
        "config",
        "plain_values",
        "structure",
        "sampling_params",
        "request",
        "backend",
        "scheduler.batch",
    },
    "kv": {"kv"},
    "scheduler": {"scheduler"},
    "text": {"text"},
    "structured": {"structured"},
    "model": {"model"},
    "between threads": {"wakeups", "mailbox", "inbox", "submission", "front_desk", "stream", "batch_run"},
    "engine thread": {
        "engine_loop",
        "steps_in_flight",
        "recovery",
        "live_requests",
        "intake",
        "row_sampling",
        "switch_interval",
    },
    "progress bars": {"progress"},
    "engine": {"engine", "lifecycle"},
    "faces": {"llm", "conversation", "__main__", ""},
    "testing": {"testing"},
}

# What the modules of a part may import of the others, when they run. (For types alone they may name anything.)
MAY_IMPORT: Final = {
    "values": set[str](),
    "kv": {"values"},
    "scheduler": {"values", "kv"},
    "text": {"values"},
    "structured": {"values", "text"},
    "model": {"values", "text"},
    "between threads": {"values"},
    "engine thread": {"values", "kv", "scheduler", "text", "structured", "between threads"},
    "progress bars": set[str](),
    "engine": {"values", "kv", "scheduler", "text", "model", "between threads", "engine thread", "progress bars"},
    "faces": {"values", "between threads", "engine thread", "progress bars", "engine"},
    "testing": set(PARTS),
}

# The libraries of a part, and of single modules where the part has fewer.
LIBRARIES: Final = {
    "values": {"numpy"},
    "kv": {"numpy"},
    "scheduler": {"numpy"},
    "text": {"numpy", "tokenizers", "transformers", "gguf", "jinja2"},
    "structured": {"numpy", "llguidance"},
    "model": {"numpy", "torch", "transformers", "safetensors", "gguf", "huggingface_hub", "flash_attn", "triton"},
    "between threads": {"trio"},
    "engine thread": {"numpy"},
    "progress bars": {"tqdm"},
    "engine": set[str](),
    "faces": set[str](),
    "testing": {"numpy", "tokenizers", "transformers", "pytest"},
}
ANYIO_MODULES: Final = {"engine", "lifecycle", "engine_loop"}

SOURCES: Final = sorted(PACKAGE.rglob("*.py"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, with where the import stands."""

    module: str
    at_start: bool  # when the importing module is imported, not in a function


def module_name(path: Path) -> str:
    """Name a source file below the package: "kv.page_pool"; the package itself is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """Return the part that a module belongs to; the longest name that covers it decides."""
    found = [
        (len(name), part)
        for part, names in PARTS.items()
        for name in names
        if module == name or (name and module.startswith(name + "."))
    ]
    assert found, f"{module} belongs to no part of PARTS"
    return max(found)[1]


def runtime_imports(tree: ast.AST, *, at_start: bool = True) -> Iterator[Import]:
    """Yield what a module imports when it runs: everything but the blocks under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for other in node.orelse:
                    yield from runtime_imports(other, at_start=at_start)
            case ast.Import(names=names):
                for alias in names:
                    yield Import(module=alias.name, at_start=at_start)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                for alias in names:
                    inner = f"{module}.{alias.name}"
                    yield Import(module=inner if is_own_module(inner) else module, at_start=at_start)
            case ast.ImportFrom():
                pytest.fail(f"line {node.lineno}: relative imports hide where a name comes from")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from runtime_imports(node, at_start=False)
            case _:
                yield from runtime_imports(node, at_start=at_start)


@functools.cache
def is_own_module(name: str) -> bool:
    """Whether a dotted name is a module of the package."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_relative_to(PACKAGE) and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


@functools.cache
def parse(path: Path) -> ast.Module:
    """Parse one source file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def own_imports(path: Path) -> dict[str, bool]:
    """Map the package's modules that a file imports to whether it does so at its start."""
    found: dict[str, bool] = {}
    for item in runtime_imports(parse(path)):
        top, _, rest = item.module.partition(".")
        if top == "asyncllm":
            found[rest] = found.get(rest, False) or item.at_start
    return found


def foreign_imports(path: Path) -> set[str]:
    """Return the top names of the third-party modules that a file imports."""
    tops = {item.module.partition(".")[0] for item in runtime_imports(parse(path))}
    return tops - sys.stdlib_module_names - {"asyncllm"}


by_source: Final = pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])


@by_source
def test_imports_go_in_one_direction(path: Path) -> None:
    part = part_of(module_name(path))
    allowed = MAY_IMPORT[part] | {part}
    wrong = {name: part_of(name) for name in own_imports(path) if part_of(name) not in allowed}
    assert not wrong, f"{module_name(path)} ({part}) may import {sorted(allowed)} only"


@by_source
def test_each_part_keeps_to_its_own_libraries(path: Path) -> None:
    module = module_name(path)
    allowed = LIBRARIES[part_of(module)] | ({"anyio"} if module in ANYIO_MODULES else set())
    assert foreign_imports(path) <= allowed


@by_source
def test_a_module_opens_with_where_it_runs(path: Path) -> None:
    text = ast.get_docstring(parse(path))
    assert text is not None
    if path.name != "__init__.py":
        where = re.search(r"\b(runs?|threads?|loop|anywhere|owns|owned|owner)\b", text, re.IGNORECASE)
        assert where, "the docstring says where the module runs, what it owns and its invariant"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): {name for name, at_start in own_imports(path).items() if at_start} for path in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["kv", "scheduler", "model", "text", "structured"])
def test_policy_device_and_text_are_plain_synchronous_code(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(parse(path)):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await), path


def test_the_device_knows_no_requests() -> None:
    for path in (PACKAGE / "model").rglob("*.py"):
        assert "request" not in own_imports(path), path


def test_only_the_opening_of_a_model_brings_device_and_text_together() -> None:
    importers = {
        module_name(path)
        for path in (PACKAGE / "model").rglob("*.py")
        if any(part_of(name) == "text" for name in own_imports(path))
    }
    assert importers <= {"model.open"}


def test_only_the_engine_starts_the_engine_loop() -> None:
    importers = {module_name(path) for path in SOURCES if "engine_loop" in own_imports(path)}
    assert importers <= {"engine", "lifecycle"}


def test_the_engine_imports_a_model_only_when_it_opens() -> None:
    for path in SOURCES:
        if part_of(module_name(path)) not in {"model", "testing"}:
            early = [name for name, at_start in own_imports(path).items() if at_start and part_of(name) == "model"]
            assert not early, path


@by_source
def test_the_package_reads_no_environment_variables(path: Path) -> None:
    for node in ast.walk(parse(path)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in {"environ", "environb", "getenv", "getenvb", "putenv"}


_REPORT = """
import asyncio, json, logging, os, signal, sys, threading, warnings

def state():
    return {
        "threads": threading.active_count(),
        "policy": repr(asyncio.events._event_loop_policy),
        "loop": repr(asyncio._get_running_loop()),
        "switch interval": sys.getswitchinterval(),
        "handlers": len(logging.getLogger().handlers),
        "filters": len(warnings.filters),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "environment": sorted(os.environ.items()),
        "recursion": sys.getrecursionlimit(),
    }

import numpy
before = state()
import {module}
after = state()
print(json.dumps({{"changed": [key for key in before if before[key] != after[key]], "modules": sorted(sys.modules)}}))
"""


@pytest.mark.parametrize("module", ["asyncllm", "asyncllm.testing"])
def test_importing_does_nothing_and_loads_no_torch(module: str) -> None:
    """No thread, loop, policy, handler or setting; nothing that takes seconds to import."""
    report = _REPORT.replace("{module}", module).replace("{{", "{").replace("}}", "}")
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, cwd=ROOT)
    result = json.loads(done.stdout)
    assert done.stderr == ""
    assert result["changed"] == []
    slow = {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "gguf",
        "jinja2",
        "llguidance",
        "trio",
        "IPython",
    }
    assert not slow & set(result["modules"])


def test_every_public_name_is_there_and_every_value_is_public() -> None:
    import asyncllm
    from asyncllm import errors, outputs

    assert all(hasattr(asyncllm, name) for name in asyncllm.__all__)
    assert set(errors.__all__) <= set(asyncllm.__all__)
    classes = {name for name in outputs.__all__ if isinstance(getattr(outputs, name), type)}
    assert classes <= set(asyncllm.__all__)


def test_the_architecture_page_names_every_module_and_no_other() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page))
    there = {
        str(path.relative_to(PACKAGE)) for path in SOURCES if path.name != "__init__.py" or len(parse(path).body) > 1
    }
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert there - named == set()
    assert named - there - tests == set()


def test_the_architecture_page_names_tests_that_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in sources]
    assert missing == []


def test_the_architecture_page_stays_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) < 200


def _texts() -> Iterator[tuple[Path, str]]:
    folders = ["asyncllm", "tests", "examples", "benchmarks", ".ci"]
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".coverage"]
    for folder in folders:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        yield path, path.read_text(encoding="utf-8")


def test_no_file_names_a_place_of_one_machine_or_a_registry() -> None:
    machine = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/\w")
    registry = re.compile(r"pypi\.(?:org|python)|python[h]osted|--(?:extra-)?index-url")
    for path, text in _texts():
        for number, line in enumerate(text.splitlines(), 1):
            assert not machine.search(line), f"{path.relative_to(ROOT)}:{number}"
            assert not registry.search(line), f"{path.relative_to(ROOT)}:{number}"
