"""A process that compiles: one JSON request a line on standard input, one JSON answer a line on standard output."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from deepinfer_conformance.triton_cpu.ahead.request import Json
from deepinfer_conformance.triton_cpu.ahead.result import MATRIX_INSTRUCTIONS, MEMORY_INSTRUCTIONS
from deepinfer_conformance.triton_cpu.errors import CompilationError

_CACHE_SCHEMA = 1
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PTX_MATRIX = re.compile(r"\b(tcgen05\.mma[\w.:]*|wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*)")
_OPCODE = re.compile(r"\b(" + "|".join((*MATRIX_INSTRUCTIONS, *MEMORY_INSTRUCTIONS)) + r")\b")


def main() -> None:
    """Answer until standard input ends; nothing but answers reaches standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the compiler prints
    answers.write(json.dumps({"ready": triton.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(message: Json) -> Json:
    try:
        return {"result": _cached(message)}
    except Exception as error:  # noqa: BLE001  # whatever a kernel or the compiler raises is this kernel's result
        text = str(error).strip()
        return {"error": f"{type(error).__name__}: {text[-2000:]}"}


def _cached(message: Json) -> Json:
    request, folder = message["request"], message["cache"]
    kernel = _kernel(request, message["path"])
    if not folder:
        return _compile(kernel, request, message["stage"])
    what = {name: value for name, value in request.items() if name != "file"}
    parts = [_CACHE_SCHEMA, triton.__version__, message["stage"], kernel.cache_key, what]
    entry = Path(folder) / f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}.json"
    if entry.exists():
        found: Json = json.loads(entry.read_text())
        return found
    result = _compile(kernel, request, message["stage"])
    # Written beside and moved: another worker may look for the same entry at this moment.
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
        json.dump(result, part)
    Path(part.name).replace(entry)
    return result


def _kernel(request: Json, path: list[str]) -> JITFunction[Any]:
    sys.path[:] = list(dict.fromkeys([*sys.path, *path]))
    found: Any = _module(request["module"], request["file"])
    for name in request["kernel"].split("."):
        found = getattr(found, name)
    while not isinstance(found, JITFunction):
        found = found.fn  # @triton.heuristics and the like
    return found


def _module(name: str, file: str) -> ModuleType:
    if name in sys.modules and name != "__main__":
        module = sys.modules[name]
    else:
        try:
            module = importlib.import_module(name) if name != "__main__" else ModuleType("")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            module = ModuleType("")
    # Another module may own the name here, or none: test modules are loaded by path.
    if getattr(module, "__file__", None) and Path(module.__file__ or "").resolve() == Path(file).resolve():
        return module
    spec = importlib.util.spec_from_file_location(f"_kernels_{hashlib.sha256(file.encode()).hexdigest()[:12]}", file)
    if spec is None or spec.loader is None:
        raise CompilationError(f"kernels of {name!r} cannot be imported, neither by name nor from {file!r}")
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _source(kernel: JITFunction[Any], request: Json) -> ASTSource:
    types, fixed = request["signature"], request["constexprs"]
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {name: _constexpr(value) for name, value in fixed.items()}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in request["aligned"]}
    return ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)


def _constexpr(value: Any) -> Any:
    return tl.dtype(value["triton_type"]) if isinstance(value, dict) else value


def _compile(kernel: JITFunction[Any], request: Json, stage: str) -> Json:
    source = _source(kernel, request)
    target = GPUTarget("cuda", request["arch"], 32)
    started = time.perf_counter()
    if stage == "ttir":
        return {"ttir": _ttir(source, target, request["options"])}
    compiled = triton.compile(source, target=target, options=request["options"])
    seconds = time.perf_counter() - started
    ptx = compiled.asm["ptx"]
    return {
        "kernel": request["kernel"],
        "arch": request["arch"],
        "triton_version": triton.__version__,
        "num_warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
        "tensor_memory_columns": compiled.metadata.tmem_size or 0,
        "ptx_instructions": dict(sorted(Counter(_PTX_MATRIX.findall(ptx)).items())),
        "ttir": str(compiled.asm["ttir"]),
        "ptx": ptx,
        "compile_s": seconds,
        **_read_binary(compiled.asm["cubin"]),
    }


def _ttir(source: ASTSource, target: GPUTarget, options: Json) -> str:
    backend = make_backend(target)
    settings = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, settings, source.language)
    functions, modules = backend.get_codegen_implementation(settings), backend.get_module_map()
    module = source.make_ir(target, settings, functions, modules, context)
    return str(stages["ttir"](module, {}))


def _read_binary(cubin: bytes) -> Json:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        has_sass = (_TOOLS / "nvdisasm").exists()
        sass = _tool("nvdisasm", "-c", file.name) if has_sass else ""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    if found.keys() != {"REG", "STACK", "LOCAL"}:
        raise CompilationError(f"cuobjdump named no registers, stack and local memory: {usage[-500:]!r}")
    counts = Counter(_OPCODE.findall(sass))
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "local_bytes": found["LOCAL"],
        "has_sass": has_sass,
        "matrix_instructions": {name: counts[name] for name in MATRIX_INSTRUCTIONS if counts[name]},
        "memory_instructions": {name: counts[name] for name in MEMORY_INSTRUCTIONS if counts[name]},
    }


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CompilationError(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    main()
