"""What is shipped: sources, build, metadata, card, and how the built kernel loads."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from generators import REPO_ID, ROOT, deep_gemm
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, DigestViolation, Metadata

build_kernel = pytest.importorskip("build_kernel", reason="scripts/ is not shipped to the CI of the Hub")

TESTS = ROOT / "tests"
PROJECT = build_kernel.Project(ROOT)
LOADERS = {"get_kernel", "get_local_kernel", "get_locked_kernel", "load_kernel"}


def tree(directory):
    """Relative path -> bytes of every file but bytecode."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def copy_project(target):
    shutil.copytree(ROOT / "torch-ext", target / "torch-ext", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", "CARD.md"):
        (target / name).write_bytes((ROOT / name).read_bytes())
    if (ROOT / "benchmarks").is_dir():
        shutil.copytree(ROOT / "benchmarks", target / "benchmarks")
    return target


def hash_variant(variant):
    return Digest.hash_variant(DigestAlgorithm.SHA256, variant)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A repository root that holds nothing but a fresh build/."""
    root = tmp_path_factory.mktemp("repo")
    build_kernel.build(ROOT, root / "build")
    return root


@pytest.fixture(scope="module", params=PROJECT.general["backends"])
def variant(request, built):
    return built / "build" / f"torch-{request.param}"


def front_matter_license(path):
    front_matter = path.read_text(encoding="utf-8").split("---\n")[1]
    return re.search(r"^license: (\S+)$", front_matter, re.MULTILINE).group(1)


# Sources


def test_sources_can_be_shipped():
    assert build_kernel.check_sources(PROJECT) == []


def test_no_generated_file_is_committed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    generated = re.compile(r"^build/|_ops\.py$|^pyproject\.toml$|^setup\.py$|^metadata-\w+\.json$|\.pyc$")
    assert [path for path in tracked.stdout.splitlines() if generated.search(path)] == []


GOOD = """
import torch
from torch.library import register_kernel
from ._ops import add_op_namespace_prefix, ops
@torch.library.custom_op(add_op_namespace_prefix("f"), mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor: ...
torch.library.register_fake(add_op_namespace_prefix("f"), torch.empty_like)
register_kernel(add_op_namespace_prefix("f"), "cpu")(f)
torch.library.opcheck(f, (1,))
"""

BAD_OPS = {
    "literal name": '@torch.library.custom_op("deep_gemm::f", mutates_args=())\ndef f(): ...',
    "keyword": '@torch.library.custom_op(name=add_op_namespace_prefix("f"), mutates_args=())\ndef f(): ...',
    "f-string": '@torch.library.custom_op(f"{NAMESPACE}::f", mutates_args=())\ndef f(): ...',
    "computed name": '@torch.library.custom_op(add_op_namespace_prefix(NAME), mutates_args=())\ndef f(): ...',
    "nested function": 'def g():\n    @torch.library.triton_op("a::f", mutates_args=())\n    def f(): ...',
    "class body": 'class G:\n    @torch.library.custom_op("a::f", mutates_args=())\n    def f(): ...',
    "functional": 'f = torch.library.custom_op("a::f", g, mutates_args=())',
    "bare decorator": "@torch.library.custom_op\ndef f(): ...",
    "alias": "register = torch.library.custom_op",
    "imported alias": "from torch.library import custom_op as op",
    "star import": "from torch.library import *",
    "imported literal": 'from torch.library import custom_op\ncustom_op("a::f", g, mutates_args=())',
    "module alias": 'import torch.library as tl\ntl.custom_op("a::f", g, mutates_args=())',
    "module import": 'from torch import library\nlibrary.custom_op("a::f", g, mutates_args=())',
    "torch alias": 'import torch as t\nt.library.register_fake("a::f")(g)',
    "getattr": 'getattr(torch.library, "custom_op")("a::f", g, mutates_args=())',
    "define": 'torch.library.define("a::f", "(Tensor x) -> Tensor")',
    "impl": 'torch.library.impl("a::f", "CPU")(g)',
    "Library": 'torch.library.Library("a", "FRAGMENT")',
    "method": "@f.register_fake\ndef _(x): ...",
    "method with device": '@f.register_kernel("cuda")\ndef _(x): ...',
    "own prefix": "def add_op_namespace_prefix(name): ...",
    "assigned prefix": "add_op_namespace_prefix = str",
    "prefix from elsewhere": "from .names import add_op_namespace_prefix",
    "prefix renamed": "from ._ops import add_op_namespace_prefix as prefix",
    "fallback": "try:\n    from ._ops import ops\nexcept ImportError:\n    ops = None",
}


def test_op_scan_accepts_prefixed_registrations():
    assert build_kernel.check_ops(ast.parse(GOOD), "good.py") == []


@pytest.mark.parametrize("source", BAD_OPS.values(), ids=BAD_OPS)
def test_op_scan_finds(source):
    problems = build_kernel.check_ops(ast.parse("import torch\n" + source), "bad.py")
    assert problems and problems[0].startswith("bad.py:")


@pytest.mark.parametrize(
    "where, source, allowed",
    [
        ("a.py", "import os.path, torch.nn, triton.language as tl", True),
        ("a.py", "from . import b\nfrom .utils.math import c", True),
        ("utils/math.py", "from .. import b", True),
        ("a.py", "from .. import b", False),
        ("utils/math.py", "from ... import b", False),
        ("a.py", "import numpy", False),
        ("a.py", "def f():\n    from numpy import array", False),
        ("a.py", "import deep_gemm.utils", False),
        ("a.py", "from deep_gemm import utils", False),
        ("a.py", "import tomllib", False),
        ("a.py", "from concurrent import futures", True),
        ("a.py", "from concurrent import interpreters", False),
        ("a.py", "import importlib\nimportlib.import_module('numpy')", False),
        ("a.py", "__import__(name)", False),
        ("a.py", "import importlib\nimportlib.import_module('.utils', __package__)", True),
    ],
)
def test_import_scan(where, source, allowed):
    assert (build_kernel.check_imports(ast.parse(source), where) == []) == allowed


@pytest.mark.parametrize("source", ["try: ...\nexcept* OSError: ...", "type A = int", "def f[T](x: T): ..."])
def test_newer_syntax_is_found(tmp_path, source):
    package = copy_project(tmp_path) / "torch-ext" / PROJECT.module
    (package / "newer.py").write_text(source)
    assert [problem for problem in build_kernel.check_sources(build_kernel.Project(tmp_path)) if "newer.py" in problem]


def test_layout_check(tmp_path):
    package = copy_project(tmp_path) / "torch-ext" / PROJECT.module
    (package / PROJECT.module).mkdir()
    (package / "types.py").write_text("")
    (package / "__init__.py").unlink()
    assert len(build_kernel.check_layout(build_kernel.Project(tmp_path))) == 3


# The one get_kernel call


def kernel_loads(path):
    """Line -> what in this file loads the kernel in a way of its own."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "generators":
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr in LOADERS else []
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in LOADERS else []
        else:
            continue
        if loads := [name for name in names if name in LOADERS or name.partition(".")[0] == PROJECT.module]:
            found[node.lineno] = loads
    return found


def test_only_generators_loads_the_kernel():
    others = [path for path in TESTS.rglob("*.py") if path.name != "generators.py" and path.parent != TESTS / "hub"]
    assert {path.name: loads for path in others if (loads := kernel_loads(path))} == {}


def test_versions_agree(built):
    version = PROJECT.general["version"]
    calls = [
        node
        for node in ast.walk(ast.parse((TESTS / "generators.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_kernel"
    ]
    assert [ast.unparse(call) for call in calls] == [f"get_kernel('{PROJECT.repo_id}', version={version})"]
    assert REPO_ID == PROJECT.repo_id
    for path in (built / "build").glob("*/metadata.json"):
        assert Metadata.read_from_file(path).version == version, path


def test_every_get_kernel_call_names_this_version():
    directories = (ROOT / "benchmarks", ROOT / "scripts", TESTS / "hub")
    scripts = [path for directory in directories for path in directory.rglob("*.py")]
    for path in [ROOT / "README.md", ROOT / "example.py", *scripts]:
        calls = re.findall(rf'get_kernel\(\s*"{PROJECT.repo_id}",\s*version=(\d+)', path.read_text(encoding="utf-8"))
        assert set(calls) <= {str(PROJECT.general["version"])}, path


# The build


def test_loaded_kernel_is_built_from_these_sources():
    if Path(deep_gemm.__file__).parent.parent != ROOT / "build":
        pytest.skip("LOCAL_KERNELS names another build")
    assert deep_gemm.__name__.rpartition("_")[2] == build_kernel.unique_id(PROJECT), "run `make build`"


def test_build_is_reproducible_and_removes_what_was_there(built, tmp_path):
    source = copy_project(tmp_path / "a" / "copy")
    for path in source.rglob("*"):
        os.utime(path, (0, 0))
    out = tmp_path / "b" / "build"
    build_kernel.build(source, out)
    for stale in ("torch-cuda/old.py", "torch-rocm/__init__.py", "torch210-cxx11-cu128-x86_64-linux/__init__.py"):
        (out / stale).parent.mkdir(exist_ok=True)
        (out / stale).write_text("stale")
    build_kernel.build(source, out)
    first, second = tree(built / "build"), tree(out)
    assert first.keys() == second.keys()
    assert [path for path in first if first[path] != second[path]] == []


def test_failed_build_leaves_the_old_one(tmp_path):
    source = copy_project(tmp_path / "copy")
    (source / "torch-ext" / PROJECT.module / "broken.py").write_text("import numpy")
    (tmp_path / "build" / "torch-cuda").mkdir(parents=True)
    (tmp_path / "build" / "torch-cuda" / "old.py").write_text("old")
    with pytest.raises(ValueError, match="broken.py:1: imports numpy"):
        build_kernel.build(source, tmp_path / "build")
    assert tree(tmp_path / "build") == {"torch-cuda/old.py": b"old"}


def test_variant_holds_the_sources_and_nothing_else(variant):
    generated = {"_ops.py", "metadata.json"}
    shipped = {path: content for path, content in tree(variant).items() if path not in generated}
    assert shipped == PROJECT.sources()
    assert set(tree(variant)) == set(shipped) | generated


def test_unique_id_follows_the_sources(tmp_path):
    before = build_kernel.unique_id(build_kernel.Project(copy_project(tmp_path)))
    assert before == build_kernel.unique_id(PROJECT)
    with (tmp_path / "torch-ext" / PROJECT.module / "__init__.py").open("a") as init:
        init.write("\n")
    after = build_kernel.unique_id(build_kernel.Project(tmp_path))
    assert after != before and re.fullmatch("[0-9a-f]{7}", after)


def test_metadata(variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    backend = variant.name.removeprefix("torch-")
    assert metadata.id == f"_{PROJECT.module}_{backend}_{build_kernel.unique_id(PROJECT)}"
    assert str(metadata.name) == PROJECT.general["name"]
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.license == PROJECT.general["license"]
    assert (metadata.upstream, metadata.source) == (PROJECT.general["upstream"], PROJECT.general["source"])
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    assert metadata.provenance is None
    raw = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", raw["kernels-minver"])
    assert list(raw["digest"]["files"]) == sorted(set(tree(variant)) - {"metadata.json"})


def test_digest_validates_and_finds_changes(variant, tmp_path):
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(hash_variant(variant))

    changed = shutil.copytree(variant, tmp_path / "changed")
    content = bytearray((changed / "_ops.py").read_bytes())
    content[0] ^= 1
    (changed / "_ops.py").write_bytes(content)
    (changed / "__init__.py").unlink()
    (changed / "extra.py").write_text("")
    with pytest.raises(DigestValidationError) as error:
        digest.validate(hash_variant(changed))
    found = {(type(violation), violation.path) for violation in error.value.violations}
    assert found == {
        (DigestViolation.HashMismatch, "_ops.py"),
        (DigestViolation.MissingFile, "__init__.py"),
        (DigestViolation.UnknownFile, "extra.py"),
    }


@pytest.mark.parametrize(
    "backend, present",
    [
        ("cpu", {}),
        ("xpu", {"version.xpu": "20250000"}),
        ("rocm", {"version.hip": "6.4"}),
        ("cuda", {"version.cuda": "13.0"}),
        ("neuron", {"version.cuda": "13.0", "neuron": object()}),
        ("tpu", {"backends.tpu": object(), "neuron": object()}),
    ],
)
def test_ops_namespace_is_of_the_running_torch(variant, monkeypatch, backend, present):
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    for name, value in present.items():
        monkeypatch.setattr(f"torch.{name}", value, raising=False)
    generated = types.ModuleType("generated")
    exec((variant / "_ops.py").read_text(), generated.__dict__)
    namespace = f"_{PROJECT.module}_{backend}_{build_kernel.unique_id(PROJECT)}"
    assert generated.add_op_namespace_prefix("f") == f"{namespace}::f"
    assert generated.ops is getattr(torch.ops, namespace)


# Licence and card


def test_licences_agree(built):
    license = PROJECT.general["license"]
    assert license == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n")
    assert front_matter_license(ROOT / "README.md") == license.lower()
    assert front_matter_license(built / "build" / "CARD.md") == license.lower()


def test_card_lists_the_public_names(built):
    card = (built / "build" / "CARD.md").read_text(encoding="utf-8")
    assert "{{" not in card and "{%" not in card
    assert re.findall(r"^- `(\w+)`$", card, re.MULTILINE) == build_kernel.public_names(PROJECT) == deep_gemm.__all__
    assert f'get_kernel("{PROJECT.repo_id}", version={PROJECT.general["version"]})' in card
    assert ("kernels benchmark" in card) == (ROOT / "benchmarks" / "benchmark.py").is_file()


# Loading


def load(path, *flags):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.update(LOCAL_KERNELS=f"{REPO_ID}={path}", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, str(TESTS / "hub" / "load.py"), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def native_variant():
    return "torch-cuda" if torch.version.cuda else "torch-cpu"


@pytest.mark.parametrize("path", [".", "build"])
def test_kernels_chooses_the_variant_of_this_torch(built, path):
    loaded = load((built / path).resolve())
    assert Path(loaded["file"]).parent == built / "build" / native_variant()
    assert loaded["matches"]


def test_variant_directory_loads(variant):
    loaded = load(variant)
    assert Path(loaded["file"]).parent == variant
    assert loaded["module"] == Metadata.read_from_file(variant / "metadata.json").id
    assert loaded["matches"]
    assert not loaded["cuda_initialized"]


def test_import_and_cpu_cast_need_no_triton(built):
    loaded = load(built, "--block-triton")
    assert loaded["matches"] and not loaded["triton"]


def test_fork_after_import(built):
    loaded = load(built, "--fork")
    assert loaded["matches"] and not loaded["cuda_initialized"]


def test_build_replaces_nothing_but_builds(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns("build", ".*", "__pycache__"))
    before = sorted(path.relative_to(project) for path in project.rglob("*"))
    for folder in (project, project / "torch-ext"):
        with pytest.raises(ValueError, match="holds no build"):
            build_kernel.build(project, folder)
    (tmp_path / "torchvision").mkdir()
    with pytest.raises(ValueError, match="holds no build"):
        build_kernel.build(project, tmp_path)
    assert sorted(path.relative_to(project) for path in project.rglob("*")) == before
