"""Builds the made-up GPU: two shared libraries, from the C files in `native/`, once per machine and torch.

    stub = build_stub()
    env["LD_PRELOAD"] = f"{stub.cuda} {stub.nvml}"

Nothing here imports torch: a parent process that only starts children must stay quick. The CUDA headers come
with the wheels that a CUDA build of torch depends on, so no CUDA toolkit is needed, only a C compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import CannotRunHere
from memfit.dryrun.symbols import called_names, rules_text, traps

LEAST_TORCH = (2, 11)
CUDA_MAJOR = 13
OTHERWISE = "Without the dry run, memfit works with its portable engine."
REINSTALL = "reinstall torch with what it needs: pip install --force-reinstall torch"

NATIVE = Path(__file__).parent / "native"
CUDA_LIBRARY = "libmemfit-cuda.so"
NVML_LIBRARY = "libmemfit-nvml.so"
LIBRARIES = (CUDA_LIBRARY, NVML_LIBRARY)
DRIVER_NAME = "libcuda.so.1"  # what Triton looks for, and the SONAME that answers a dlopen() of the driver
MANAGEMENT_NAME = "libnvidia-ml.so.1"
DIGESTS = "SHA256"
NVML_SOURCE = "nvml.c"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    # Unused parameters are the nature of a stub; everything else must compile without a warning.
    *("-Wall", "-Wextra", "-Wno-unused-parameter"),
)


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The torch that is installed, as its files tell."""

    version: str
    cuda: str | None  # "13.0"; None for a CPU build
    site: Path  # the folder that holds torch/ and nvidia/

    @property
    def includes(self) -> tuple[Path, ...]:
        """The folders with the CUDA and cuDNN headers."""
        nvidia = self.site / "nvidia"
        return (nvidia / f"cu{CUDA_MAJOR}" / "include", nvidia / "cudnn" / "include")


@dataclass(frozen=True, kw_only=True)
class Stub:
    """The two libraries to preload, and whether they could be kept for the next time."""

    cuda: Path
    nvml: Path
    kept: bool = True
    note: str | None = None


@functools.cache
def torch_build() -> TorchBuild:
    """The installed torch, found without importing it.

    Raises CannotRunHere when there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotRunHere("torch is not installed; install it with: pip install 'memfit[torch]'")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__\s*=\s*'([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    if version is None:
        raise CannotRunHere(f"{folder / 'version.py'} names no version; reinstall torch")
    return TorchBuild(version=version[1], cuda=cuda[1] if cuda else None, site=folder.parent)


def check_platform() -> None:
    """Raises CannotRunHere where the made-up GPU cannot exist."""
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise CannotRunHere(
            f"the dry run needs Linux on x86-64 (WSL2 counts), and this is {here}. {OTHERWISE}"
        )


def check_torch(build: TorchBuild) -> None:
    """Raises CannotRunHere unless this torch is one that the made-up GPU works under."""
    if build.cuda is None:
        raise CannotRunHere(
            f"torch {build.version} is a CPU build, and the dry run needs a CUDA build (no GPU): "
            f"pip install torch from PyPI, without an index for CPU builds. {OTHERWISE}"
        )
    numbers = tuple(int(n) for n in re.findall(r"\d+", build.version)[:2])
    if numbers < LEAST_TORCH:
        raise CannotRunHere(
            f"torch {build.version} is too old for the dry run, which needs "
            f"{'.'.join(map(str, LEAST_TORCH))} or later: pip install -U torch. {OTHERWISE}"
        )
    if int(build.cuda.split(".")[0]) != CUDA_MAJOR:
        raise CannotRunHere(
            f"torch {build.version} is built for CUDA {build.cuda}, and the dry run needs a build for "
            f"CUDA {CUDA_MAJOR}, as PyPI has it: pip install -U torch. {OTHERWISE}"
        )
    for folder in build.includes:
        if not folder.is_dir():
            raise CannotRunHere(f"{folder} is missing, which torch {build.version} needs; {REINSTALL}")


def find_compiler() -> list[str]:
    """The C compiler's command: $CC, else the first of cc, gcc, clang on the path.

    Raises CannotRunHere when there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    what = f"CC={named[0]} is not a program" if named else "no C compiler was found (cc, gcc, clang)"
    raise CannotRunHere(
        f"{what}, and the dry run compiles a small library once. Install one "
        f"(Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc) or set CC. {OTHERWISE}"
    )


def build_stub() -> Stub:
    """The made-up GPU's libraries, from the cache or freshly compiled.

    Raises CannotRunHere with the remedy when the platform, torch or the compiler does not allow it.
    """
    check_platform()
    build = torch_build()
    check_torch(build)
    compiler = find_compiler()
    folder, kept, note = _cache_folder()
    target = folder / f"gpu-{_key(build, compiler)}"
    with _locked(folder / f"{target.name}.lock"):
        if not _intact(target):
            _build_into(target, build, compiler)
    _refuse_unloadable(target / CUDA_LIBRARY)
    return Stub(cuda=target / CUDA_LIBRARY, nvml=target / NVML_LIBRARY, kept=kept, note=note)


# ----------------------------------------------------------------- the cache folder


def _candidates() -> Iterator[Path]:
    for name, below in (("MEMFIT_CACHE", ""), ("XDG_CACHE_HOME", "memfit")):
        if os.environ.get(name):
            yield Path(os.environ[name]) / below
            if name == "MEMFIT_CACHE":
                return
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".cache" / "memfit"


def _cache_folder() -> tuple[Path, bool, str | None]:
    """A folder that only this user can write, whether it stays, and why not."""
    reasons = []
    for folder in _candidates():
        if re.search(r"[\s:]", str(folder)):
            reasons.append(f"LD_PRELOAD cannot name {folder}, because of the space or colon in it")
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_shared(folder)
            if os.access(folder, os.W_OK):
                return folder, True, None
            reasons.append(f"{folder} is not writable")
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    note = (
        f"the compiled GPU library is not kept: {'; '.join(reasons)} (set MEMFIT_CACHE to a folder of yours)"
    )
    return _temporary_folder(), False, note


def _refuse_shared(folder: Path) -> None:
    """What is loaded into a user's process must come from a folder that nobody else can write."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise CannotRunHere(
            f"the cache folder {folder} belongs to another user; set MEMFIT_CACHE to a folder of yours"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotRunHere(f"other users can write the cache folder {folder}; run: chmod go-w {folder}")


def _refuse_unloadable(library: Path) -> None:
    """A file system that is mounted noexec holds libraries that nobody can load."""
    try:
        with library.open("rb") as file:
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE).close()
    except PermissionError as error:
        raise CannotRunHere(
            f"{library} cannot be loaded ({error.strerror}; is its file system mounted noexec?); "
            "set MEMFIT_CACHE to a folder that allows it"
        ) from error


@functools.cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="memfit-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps a second process waiting while the first one builds."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------- building


def _sources() -> list[Path]:
    return sorted(p for p in NATIVE.rglob("*") if p.suffix in (".c", ".h"))


def _key(build: TorchBuild, compiler: Sequence[str]) -> str:
    """Names a build: everything that its result depends on."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(f"{path.relative_to(NATIVE)}\0".encode() + path.read_bytes() + b"\0")
    told = [build.version, str(build.cuda), str(build.site), *compiler, _version_of(tuple(compiler)), *FLAGS]
    digest.update("\0".join([*told, rules_text()]).encode())
    return digest.hexdigest()[:24]


@functools.cache
def _version_of(compiler: tuple[str, ...]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _intact(target: Path) -> bool:
    """Whether the folder holds both libraries as they were built."""
    try:
        lines = (target / DIGESTS).read_text(encoding="ascii").splitlines()
        recorded = {name: digest for digest, name in (line.split() for line in lines)}
        return all(_digest(target / name) == recorded[name] for name in LIBRARIES)
    except (OSError, KeyError, ValueError):
        return False


def _build_into(target: Path, build: TorchBuild, compiler: Sequence[str]) -> None:
    """Compiles beside the target and moves the finished folder into place."""
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as scratch:
        traps_file, made = Path(scratch) / "traps.c", Path(scratch) / "made"
        names = called_names(build.site / "torch" / "lib", _cuda_runtime(build))
        traps_file.write_text(traps(names), encoding="ascii")
        made.mkdir()
        cuda = [p for p in _sources() if p.suffix == ".c" and p.name != NVML_SOURCE]
        _compile(made / CUDA_LIBRARY, DRIVER_NAME, [*cuda, traps_file], build, compiler)
        _compile(made / NVML_LIBRARY, MANAGEMENT_NAME, [NATIVE / NVML_SOURCE], build, compiler)
        digests = "".join(f"{_digest(made / name)}  {name}\n" for name in LIBRARIES)
        (made / DIGESTS).write_text(digests, encoding="ascii")
        (made / DRIVER_NAME).symlink_to(CUDA_LIBRARY)
        if target.exists():
            shutil.rmtree(target)
        os.rename(made, target)


def _cuda_runtime(build: TorchBuild) -> Path:
    """NVIDIA's CUDA runtime library that this torch uses."""
    folder = build.includes[0].parent / "lib"
    found = sorted(folder.glob("libcudart.so.*"))
    if not found:
        raise CannotRunHere(f"{folder} has no libcudart.so, which torch {build.version} needs; {REINSTALL}")
    return found[0]


def _compile(
    output: Path, soname: str, sources: Sequence[Path], build: TorchBuild, compiler: Sequence[str]
) -> None:
    includes = [f"-I{folder}" for folder in (NATIVE / "shim", NATIVE, *build.includes)]
    linking = [
        f"-Wl,-soname,{soname}",
        "-Wl,-z,defs",
        "-o",
        str(output),
        *map(str, sources),
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run(
        [*compiler, *FLAGS, *includes, *linking], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        what = errors[0] if errors else done.stderr.strip()[-300:]
        raise CannotRunHere(
            f"{compiler[0]} could not compile the made-up GPU for torch {build.version}: {what} "
            f"(it needs the C library's headers too: apt install gcc libc6-dev). {OTHERWISE}"
        )
