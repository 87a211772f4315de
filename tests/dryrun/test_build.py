"""Building the made-up GPU: from C, once, safely, and with a remedy in every refusal."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memfit.core.errors import CannotRunHere
from memfit.dryrun import build
from memfit.dryrun.build import (
    TorchBuild,
    build_stub,
    check_platform,
    check_torch,
    find_compiler,
    torch_build,
)
from memfit.dryrun.symbols import answer, dynamic_symbols, traps


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMFIT_CACHE", str(folder))
    return folder


def torch_like(
    *, version: str = "2.14.1+cu130", cuda: str | None = "13.0", site: Path = Path("/none")
) -> TorchBuild:
    return TorchBuild(version=version, cuda=cuda, site=site)


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (torch_like(version="2.13.0+cpu", cuda=None), "CPU build"),
        (torch_like(version="2.10.0"), "2.11 or later"),
        (torch_like(version="2.12.0+cu128", cuda="12.8"), "CUDA 13"),
        (torch_like(), "reinstall torch"),
    ],
)
def test_a_torch_that_cannot_do_it_is_named_with_the_remedy(found: TorchBuild, remedy: str) -> None:
    with pytest.raises(CannotRunHere) as refused:
        check_torch(found)
    assert remedy in str(refused.value)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotRunHere, match=r"pip install 'memfit\[torch\]'"):
        torch_build.__wrapped__()


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(CannotRunHere, match="x86-64"):
        check_platform()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotRunHere, match="apt install gcc"):
        find_compiler()


def test_cc_names_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    with pytest.raises(CannotRunHere, match="CC=no-such-compiler"):
        find_compiler()


@pytest.mark.dryrun
def test_a_compiler_that_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CannotRunHere, match="libc6-dev"):
        build_stub()
    assert not list(cache.glob("building-*"))


def test_finding_torch_does_not_import_it() -> None:
    code = "import sys; from memfit.dryrun import build; build.torch_build(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ----------------------------------------------------------------------- the cache


@pytest.mark.dryrun
def test_it_is_built_once_for_this_user_only(cache: Path) -> None:
    first = build_stub()
    made = first.cuda.stat().st_mtime_ns
    assert build_stub() == first
    assert first.cuda.stat().st_mtime_ns == made
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert first.kept and first.note is None


@pytest.mark.dryrun
def test_every_warning_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{' '.join(find_compiler())} -Werror")
    assert build_stub().cuda.is_file()


@pytest.mark.dryrun
def test_a_library_that_was_changed_is_built_again(cache: Path) -> None:
    stub = build_stub()
    good = stub.cuda.read_bytes()
    stub.cuda.write_bytes(good + b"x")
    assert build_stub().cuda.read_bytes() != good + b"x"


@pytest.mark.dryrun
def test_processes_that_build_at_the_same_time(cache: Path) -> None:
    code = "from memfit.dryrun.build import build_stub; print(build_stub().cuda)"

    def run(_: int) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        answers = set(pool.map(run, range(3)))
    assert len(answers) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


def test_a_folder_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(CannotRunHere, match="chmod go-w"):
        build._cache_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    with pytest.raises(CannotRunHere, match="another user"):
        build._cache_folder()


@pytest.mark.parametrize("name", ["occupied/cache", "with space", "with:colon"])
def test_a_folder_that_cannot_be_used_is_replaced_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file where a folder would have to be")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / name))
    folder, kept, note = build._cache_folder()
    assert folder.is_dir() and not kept
    assert note is not None and str(tmp_path / name) in note and "MEMFIT_CACHE" in note


# ------------------------------------------------------------------- calls and traps


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cudaGraphAddKernelNode", ("REFUSE", 801)),
        ("cudaGetErrorString", None),
        ("cuMemcpyDtoH_v2", ("REFUSE", 801)),
        ("cublasSgemm_v2", ("IGNORE", 0)),
        ("cublasLtMatmulAlgoGetIds", ("REFUSE", 15)),
        ("cudnnCTCLoss", ("REFUSE", 3000)),
        ("cudnnSetTensorNdDescriptor", None),
        ("cusolverDnSgetrs", ("IGNORE", 0)),
        ("cusolverDnXtrtri_bufferSize", ("REFUSE", 9)),
        ("cusparseCreateCsr", None),
        ("cusparseSpGEMM_compute", ("REFUSE", 10)),
        ("cusparseLtInit", ("REFUSE", 10)),
        ("cuptiActivityEnable", ("SKIP", 0)),
        ("ncclGetErrorString", None),
        ("nvrtcCompileProgram", None),
        ("custom_allocator", None),
        ("malloc", None),
    ],
)
def test_how_a_call_that_is_not_modelled_is_answered(name: str, want: tuple[str, int] | None) -> None:
    assert answer(name) == want
    assert (f"({name}" in traps([name])) == (want is not None)


@pytest.mark.dryrun
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to compare with")
def test_symbols_are_read_as_nm_reads_them() -> None:
    library = torch_build().site / "torch" / "lib" / "libc10_cuda.so"
    listed = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1].split("@")[0] for line in listed.splitlines() if line[17:18] in "Uwv"}
    assert dynamic_symbols(library).undefined == undefined


@pytest.mark.dryrun
def test_every_driver_facing_call_of_torch_is_answered_here() -> None:
    names = build.called_names(torch_build().site / "torch" / "lib", build._cuda_runtime(torch_build()))
    ours = dynamic_symbols(build_stub().cuda).defined
    assert {name for name in names if answer(name) is not None} <= ours


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libfoo.so"
    path.write_bytes(b"not a library")
    with pytest.raises(CannotRunHere, match="libfoo"):
        dynamic_symbols(path)
