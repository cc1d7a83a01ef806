"""Environment variables: the one table that declares them, and the only reader of the environment in `deepinfer`.

Everything else receives a frozen :class:`Settings`. ``deepinfer env --markdown`` writes ``docs/environment.md`` from
the same table, so a variable cannot exist without its type, default and effect being documented.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deepinfer.errors import ConfigurationError

PREFIX: Final = "DEEPINFER_"

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable.

    Attributes:
        name: the variable, with the prefix.
        type: its type in words, as the documentation shows it.
        default: what an unset variable means, in words.
        effect: what it does, in one or two sentences.
        choices: the values that are accepted; empty when any value of the type is.
    """

    name: str
    type: str
    default: str
    effect: str
    choices: tuple[str, ...] = ()

    @property
    def values(self) -> str:
        """The accepted values in words."""
        return " | ".join(self.choices) if self.choices else self.type


ACCELERATOR: Final = Setting(
    name="DEEPINFER_ACCELERATOR",
    type="name of an installed driver",
    default="the first available of ascend, nvidia, cpu_ref",
    effect="Chooses the accelerator driver. A driver that is named and cannot be used is an error, never replaced.",
)
ALLOW_FALLBACK: Final = Setting(
    name="DEEPINFER_ALLOW_FALLBACK",
    type="op names, separated by commas",
    default="none",
    effect="Lets the named ops run on the reference driver `cpu_ref` when the chosen driver lacks them. "
    "Each one shows in the plan and in the log.",
)
BATCH_INVARIANT: Final = Setting(
    name="DEEPINFER_BATCH_INVARIANT",
    type="bool",
    default="0",
    effect="Demands that a request's tokens do not depend on what else is in the batch (repeatability level R2). "
    "A driver that cannot prove it refuses to start.",
    choices=("0", "1"),
)
LOG_LEVEL: Final = Setting(
    name="DEEPINFER_LOG_LEVEL",
    type="level",
    default="info",
    effect="Lowest level that the commands log on standard error; `debug` also shows the traceback of an error.",
    choices=("debug", "info", "warning", "error"),
)
PREFILL_TRUNCATION_MODE: Final = Setting(
    name="DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    type="mode",
    default="off",
    effect="Which rows of a prompt run the layers behind the last owner of long-range entries, where "
    "`LLM(truncated_prefill=)` does not say: all of them, or the last ones, computed with (`mask`) or without "
    "(`compact`) the others.",
    choices=("off", "mask", "compact"),
)
PREFILL_KEEP_TOKENS: Final = Setting(
    name="DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    type="number of tokens",
    default="140",
    effect="How many last rows of a prompt a truncated prefill keeps, where "
    "`LLM(truncated_prefill_keep_tokens=)` does not say.",
)
ZERO_OVERHEAD_SCHEDULING: Final = Setting(
    name="DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    type="bool",
    default="1",
    effect="Plans and launches a decode step before the one before it has been read, where "
    "`LLM(async_scheduling=)` does not say. The outputs are the same.",
    choices=("0", "1"),
)
DECODE_GRAPHS: Final = Setting(
    name="DEEPINFER_DECODE_GRAPHS",
    type="bool",
    default="where the driver can and it saves time",
    effect="Records decode steps as graphs, where `LLM(decode_graphs=)` does not say. `1` on a driver that cannot is "
    "an error; `deepinfer plan` says what is recorded, or why not.",
    choices=("0", "1"),
)
GRAPH_INTERVAL: Final = Setting(
    name="DEEPINFER_GRAPH_INTERVAL",
    type="number of rows",
    default="8",
    effect="Graphs are recorded for 1, 2, 4, ... rows up to this number, then for its multiples, where "
    "`LLM(graph_interval=)` does not say.",
)
ENABLE_MTP_VARLEN: Final = Setting(
    name="DEEPINFER_ENABLE_MTP_VARLEN",
    type="bool",
    default="0",
    effect="Lets every step choose how many drafts each request verifies, where `LLM(variable_verification=)` does not "
    "say. Without drafts it does nothing.",
    choices=("0", "1"),
)
COST_CURVES: Final = Setting(
    name="DEEPINFER_COST_CURVES",
    type="directory",
    default="none: measured at every start",
    effect="Where the measured costs of decode steps are kept from one start to the next, where "
    "`LLM(cost_curves=)` does not say. Files there that are not ours are left alone.",
)
REDUNDANT_EXPERTS: Final = Setting(
    name="DEEPINFER_REDUNDANT_EXPERTS",
    type="number of slots",
    default="0",
    effect="Slots for experts beyond one an expert, where experts are spread over ranks and "
    "`LLM(redundant_experts=)` does not say. It is rounded up so that every rank has equally many.",
)
EXPERT_BALANCING: Final = Setting(
    name="DEEPINFER_EXPERT_BALANCING",
    type="policy",
    default="`balanced` where there are redundant slots, else `off`",
    effect="Who moves experts between ranks while they serve, where `LLM(expert_balancing=)` does not say. Where every "
    "rank holds all experts it does nothing.",
    choices=("off", "greedy", "balanced"),
)
NVIDIA_INTERPRET: Final = Setting(
    name="DEEPINFER_NVIDIA_INTERPRET",
    type="bool",
    default="0",
    effect="Runs the kernels of the `nvidia` driver in an interpreter on the CPU, some thousand times slower than a "
    "GPU. For tests and study only; it needs triton 3.9.0 and no GPU.",
    choices=("0", "1"),
)
NVIDIA_PROVIDERS: Final = Setting(
    name="DEEPINFER_NVIDIA_PROVIDERS",
    type="names of libraries, separated by commas",
    default="none",
    effect="Lets the installed libraries `flash_mla` and `deep_gemm` serve ops of the `nvidia` driver in place of its "
    "own kernels. One that is named and cannot be used is an error; the plan names each op that one serves.",
)

SETTINGS: Final = (
    ACCELERATOR,
    ALLOW_FALLBACK,
    BATCH_INVARIANT,
    LOG_LEVEL,
    PREFILL_TRUNCATION_MODE,
    PREFILL_KEEP_TOKENS,
    ZERO_OVERHEAD_SCHEDULING,
    DECODE_GRAPHS,
    GRAPH_INTERVAL,
    ENABLE_MTP_VARLEN,
    COST_CURVES,
    REDUNDANT_EXPERTS,
    EXPERT_BALANCING,
    NVIDIA_INTERPRET,
    NVIDIA_PROVIDERS,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for, checked. Field names are the variables' without prefix, in lower case."""

    accelerator: str | None = None
    allow_fallback: tuple[str, ...] = ()
    batch_invariant: bool = False
    log_level: str = "info"
    yoco_prefill_truncation_mode: str = "off"
    yoco_prefill_keep_tokens: int = 140
    zero_overhead_scheduling: bool = True
    decode_graphs: bool | None = None
    graph_interval: int = 8
    enable_mtp_varlen: bool = False
    cost_curves: str | None = None
    redundant_experts: int = 0
    expert_balancing: str | None = None
    nvidia_interpret: bool = False
    nvidia_providers: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of ``environ`` (this process's environment when None).

        An empty value counts as unset. Raises ConfigurationError with every bad value and every unknown
        ``DEEPINFER_`` name at once.
        """
        reader = _Reader(os.environ if environ is None else environ)
        settings = cls(
            accelerator=reader.text(ACCELERATOR),
            allow_fallback=reader.names(ALLOW_FALLBACK),
            batch_invariant=reader.flag(BATCH_INVARIANT, default=False),
            log_level=reader.choice(LOG_LEVEL),
            yoco_prefill_truncation_mode=reader.choice(PREFILL_TRUNCATION_MODE),
            yoco_prefill_keep_tokens=reader.count(PREFILL_KEEP_TOKENS),
            zero_overhead_scheduling=reader.flag(ZERO_OVERHEAD_SCHEDULING, default=True),
            decode_graphs=reader.flag(DECODE_GRAPHS, default=False) if reader.text(DECODE_GRAPHS) else None,
            graph_interval=reader.count(GRAPH_INTERVAL),
            enable_mtp_varlen=reader.flag(ENABLE_MTP_VARLEN, default=False),
            cost_curves=reader.text(COST_CURVES),
            redundant_experts=reader.count(REDUNDANT_EXPERTS, least=0),
            expert_balancing=reader.choice(EXPERT_BALANCING) if reader.text(EXPERT_BALANCING) else None,
            nvidia_interpret=reader.flag(NVIDIA_INTERPRET, default=False),
            nvidia_providers=reader.names(NVIDIA_PROVIDERS),
        )
        problems = [*reader.problems, *reader.unknown()]
        if problems:
            raise ConfigurationError("environment variables", problems)
        return settings


def keep_torch_from_loading_backends() -> None:
    """Tell torch, before it is imported, not to import every installed backend with itself.

    torch_npu fails there where CANN is missing, and then ``import torch`` fails in every process. The Ascend driver
    imports torch_npu when it is asked for, so nobody needs this. A value that the user has set stays; where torch was
    imported first, its own error names the variable.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """What a launcher has told this process about the group of processes to which it belongs.

    torchrun, Ray and our own launcher say it in the variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT.

    Attributes:
        rank: this process's number, from 0.
        world_size: processes in the group.
        local_rank: its number on its machine.
        local_world_size: processes on its machine.
        host: where rank 0 is found.
        port: a port there: free, or held by the launcher's own store.
        has_store: the launcher holds a store at that port (torchrun does), through which ranks can meet.
        attempt: tells a restart of the group from the one before it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    has_store: bool = False
    attempt: str = "0"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
        """Return this process's place, None where no launcher has started several.

        Raises ConfigurationError with everything that is missing or wrong where WORLD_SIZE says that there are several.
        """
        source = os.environ if environ is None else environ
        world = source.get("WORLD_SIZE", "").strip()
        if world in ("", "1"):
            return None
        problems: list[str] = []

        def number(name: str, default: int | None = None) -> int:
            text = source.get(name, "").strip()
            if not text and default is not None:
                return default
            if text.isascii() and text.isdigit():
                return int(text)
            problems.append(f"{name}={text!r} is no whole number of 0 or more")
            return 0

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        place = cls(
            rank=rank,
            world_size=world_size,
            local_rank=number("LOCAL_RANK", rank),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
            host=source.get("MASTER_ADDR", "").strip(),
            port=number("MASTER_PORT"),
            has_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "").strip() == "True",
            attempt=source.get("TORCHELASTIC_RESTART_COUNT", "").strip() or "0",
        )
        if not problems and not rank < world_size:
            problems.append(f"RANK={rank} is outside a group of {world_size}")
        if not place.host:
            problems.append("MASTER_ADDR is not set; it says where rank 0 is found")
        if problems:
            problems.append("a launcher sets all of them (docs/ranks.md); unset WORLD_SIZE to run one process")
            raise ConfigurationError("environment variables of a launcher", problems)
        return place

    def enter(self) -> None:
        """Tell this process what a launcher would have told it: some drivers choose their device by it."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.host,
            MASTER_PORT=str(self.port),
        )
        if self.local_world_size == self.world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine's own name need not lead to it


@dataclass(frozen=True, slots=True)
class SettingValue:
    """One variable and what the environment says about it; ``value`` is None when it is unset."""

    setting: Setting
    value: str | None


def current(environ: Mapping[str, str] | None = None) -> tuple[SettingValue, ...]:
    """Return every declared variable with its raw value, unchecked, in the order of the table."""
    source = os.environ if environ is None else environ
    return tuple(SettingValue(setting, source.get(setting.name)) for setting in SETTINGS)


def markdown() -> str:
    """Return the page docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Written by `deepinfer env --markdown > docs/environment.md` from the table in `deepinfer/settings.py`; "
        "a test fails when the two differ. Edit the table, not this page.",
        "",
        f"An empty value counts as unset. A variable that begins with `{PREFIX}` and is not listed here is refused.",
        "",
        "| variable | values | default | effect |",
        "| --- | --- | --- | --- |",
    ]
    for setting in SETTINGS:
        values = setting.values.replace("|", "\\|")
        lines.append(f"| `{setting.name}` | {values} | {setting.default} | {setting.effect} |")
    return "\n".join(lines) + "\n"


class _Reader:
    """Parses one variable at a time and gathers every problem."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, setting: Setting) -> str | None:
        return self._environ.get(setting.name, "").strip() or None

    def names(self, setting: Setting) -> tuple[str, ...]:
        text = self.text(setting)
        if text is None:
            return ()
        names = [name.strip() for name in text.split(",")]
        if not all(names):
            self.problems.append(f"{setting.name}={text!r} has an empty entry; write {setting.type}")
        return tuple(dict.fromkeys(name for name in names if name))

    def flag(self, setting: Setting, *, default: bool) -> bool:
        text = self.text(setting)
        if text is None:
            return default
        if text.lower() in _TRUE:
            return True
        if text.lower() not in _FALSE:
            accepted = ", ".join(f"{yes}/{no}" for yes, no in zip(_TRUE, _FALSE, strict=True))
            self.problems.append(f"{setting.name}={text!r} is not a truth value; write one of {accepted}")
        return False

    def count(self, setting: Setting, *, least: int = 1) -> int:
        text = self.text(setting) or setting.default
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            self.problems.append(
                f"{setting.name}={text!r} is no {setting.type}; write a whole number of {least} or more"
            )
            return int(setting.default)
        return int(text)

    def choice(self, setting: Setting) -> str:
        text = self.text(setting)
        if text is None:
            return setting.default
        if text.lower() not in setting.choices:
            self.problems.append(f"{setting.name}={text!r} is unknown; write one of {', '.join(setting.choices)}")
        return text.lower()

    def unknown(self) -> list[str]:
        known = [setting.name for setting in SETTINGS]
        problems = []
        # Any capitalisation: `deepinfer_accelerator` is a mistake as well, and would be ignored in silence.
        for name in sorted(self._environ):
            if name.upper().startswith(PREFIX) and name not in known:
                close = difflib.get_close_matches(name.upper(), known, n=2, cutoff=0.7)
                advice = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
                problems.append(f"{name} is not a variable of this version; {advice}")
        return problems
