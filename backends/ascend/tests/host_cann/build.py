"""Compiles the host CANN against the headers of the torch_npu wheel, once per digest of everything it is made of."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host_cann.errors import HostCannError

LIBRARIES = (
    "libascendcl",
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
    "libopapi",
)
"""What torch_npu links or opens by name; each is an empty shell around the one library that has everything."""

_SOURCES = Path(__file__).parent / "native"
_QUIET = re.compile(r"Msprof.*|aclmdlSetDump")
_TRAMPOLINES = """
    .text
    .macro PHASE name, label
    .globl \\name
    .type \\name, @function
\\name:
    endbr64
    .endm
host_cann_enter:
    pushq %rbp
    movq %rsp, %rbp
    subq $112, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movsd %xmm0, 48(%rsp)
    movsd %xmm1, 56(%rsp)
    movsd %xmm2, 64(%rsp)
    movsd %xmm3, 72(%rsp)
    movsd %xmm4, 80(%rsp)
    movsd %xmm5, 88(%rsp)
    movsd %xmm6, 96(%rsp)
    movsd %xmm7, 104(%rsp)
    movl %eax, %edi
    movq %rsp, %rsi
    leaq 48(%rsp), %rdx
    leaq 16(%rbp), %rcx
    call host_cann_phase1@PLT
    leave
    ret
host_cann_launch:
    movq %rcx, %r8
    movq %rdx, %rcx
    movq %rsi, %rdx
    movq %rdi, %rsi
    movl %eax, %edi
    jmp host_cann_phase2@PLT
"""


def library_folder(site_packages: Path) -> Path:
    """Return the folder with the seven libraries, compiled now if nobody did before."""
    if platform.machine() != "x86_64":
        raise HostCannError(f"the host CANN reads call frames of x86_64, this machine is {platform.machine()!r}")
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if missing:
        raise HostCannError(f"the host CANN needs {', '.join(missing)} in PATH; install gcc, g++ and binutils")
    wheel = site_packages / "torch_npu"
    folder = _cache() / _digest(wheel)
    if (folder / "done").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _compile(wheel, Path(scratch))
        (Path(scratch) / "done").touch()
        try:
            Path(scratch).rename(folder)
        except OSError:
            if not (folder / "done").exists():  # another process was faster, or the disk is at fault
                raise
        else:
            Path(scratch).mkdir()  # for TemporaryDirectory to remove
    return folder


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path(tempfile.gettempdir())) / f"host_cann_{os.getuid()}"


def _digest(wheel: Path) -> str:
    digest = hashlib.sha256()
    for path in [*sorted(_SOURCES.iterdir()), Path(__file__), wheel / "version.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(wheel: Path, folder: Path) -> None:
    include = wheel / "include"
    flags = ["-O1", "-fPIC", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"]
    flags += [f"-isystem{include}", f"-isystem{include}/third_party/acl/inc", f"-isystem{include}/third_party/hccl/inc"]
    sources = sorted(_SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(max_workers=4) as pool:
        commands = [("g++", *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")) for source in sources]
        list(pool.map(lambda command: _run(*command), commands))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    defined = set(_symbols("--defined-only", *objects))
    (folder / "names.S").write_text(_assembly(wheel, defined))
    _run("gcc", "-c", "-fPIC", str(folder / "names.S"), "-o", str(folder / "names.o"))
    everything = folder / "libhost_cann.so"
    _run(
        "g++",
        "-shared",
        "-Wl,-soname,libhost_cann.so",
        "-o",
        str(everything),
        *objects,
        str(folder / "names.o"),
        "-lrt",
    )
    for library in LIBRARIES:
        (folder / "empty.c").write_text(f"int host_cann_shell_{library};\n")
        _run(
            "gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}.so", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN",
            "-o", str(folder / f"{library}.so"), str(folder / "empty.c"), f"-L{folder}", "-lhost_cann",
        )  # fmt: skip
    for scrap in [*folder.glob("*.o"), folder / "names.S", folder / "empty.c"]:
        scrap.unlink()


def _assembly(wheel: Path, defined: set[str]) -> str:
    """Return one trampoline per aclnn operator, and one refusal for every other name that torch_npu may look up."""
    binary = (wheel / "lib" / "libtorch_npu.so").read_bytes()
    operators = sorted(
        {_text(name) for name in re.findall(rb"\0(aclnn[A-Z][A-Za-z0-9]+?)(?:GetWorkspaceSize)?(?=\0)", binary)}
    )
    looked_up = {
        _text(name) for name in re.findall(rb"\0((?:aclrt|aclmdl|aclprof|aclop|aclsys|acl|Hccl)[A-Z]\w+)(?=\0)", binary)
    }
    linked = _symbols("--undefined-only", *map(str, [*wheel.glob("lib/*.so"), *wheel.glob("_C*.so")]))
    wanted = looked_up | {name for name in linked if re.match(r"(Msprof|acl|rt[A-Z]|Hccl)", name)}
    operators = [name for name in operators if name not in defined]
    lines = [_TRAMPOLINES]
    for index, name in enumerate(operators):
        lines += [f"PHASE {name}GetWorkspaceSize", f"movl ${index}, %eax", "jmp host_cann_enter"]
        lines += [f"PHASE {name}", f"movl ${index}, %eax", "jmp host_cann_launch"]
    refused = sorted(name for name in wanted if name not in defined and not name.startswith("aclnn"))
    for index, name in enumerate(refused):
        quiet = ["xorl %eax, %eax", "ret"]
        loud = [f"leaq .Lrefused{index}(%rip), %rdi", "jmp host_cann_refuse@PLT"]
        lines += [f"PHASE {name}", *(quiet if _QUIET.fullmatch(name) else loud)]
    lines.append(".section .rodata")
    lines += [f'.Lrefused{index}: .asciz "{name}"' for index, name in enumerate(refused)]
    lines += [f'.Loperator{index}: .asciz "{name}"' for index, name in enumerate(operators)]
    lines += [".section .data.rel.ro", ".globl host_cann_operator_names", ".p2align 3", "host_cann_operator_names:"]
    lines += [f".quad .Loperator{index}" for index in range(len(operators))]
    lines += [".globl host_cann_operator_count", "host_cann_operator_count:", f".long {len(operators)}"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _text(name: bytes) -> str:
    return name.decode("ascii")


def _symbols(which: str, *files: str) -> list[str]:
    dynamic = ["-D"] if which == "--undefined-only" else []
    output = _run("nm", *dynamic, which, *files)
    return [line.split()[-1] for line in output.splitlines() if line and not line.endswith(":")]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostCannError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout
