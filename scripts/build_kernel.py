"""Build the Hub kernel: torch-ext/<module> becomes build/torch-<backend>, with the same bytes for the same sources.

Stands in for kernel-builder where there is no Nix. The result carries no provenance: that is for release builds.
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import jinja2
import tomlkit
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 10)
KERNELS_MINVER = "0.14.0"

# Standard modules that some Python from 3.10 to 3.14 lacks.
NOT_IN_EVERY_PYTHON = {
    "aifc", "annotationlib", "asynchat", "asyncore", "audioop", "binhex", "cgi", "cgitb", "chunk", "compression",
    "concurrent.interpreters", "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib",
    "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "string.templatelib", "sunau", "telnetlib", "tomllib", "uu",
    "xdrlib",
}  # fmt: skip
IMPORTABLE = set(sys.stdlib_module_names) | {"torch", "triton"}

TORCH_LIBRARY = "torch.library."
REGISTRATIONS = {
    "custom_op", "define", "impl", "impl_abstract", "register_autocast", "register_autograd", "register_fake",
    "register_kernel", "register_torch_dispatch", "register_vmap", "triton_op",
}  # fmt: skip
LIBRARIES = {"Library", "_scoped_library"}
PREFIX = "add_op_namespace_prefix"

OPS = '''\
import torch


def _backend() -> str:
    if hasattr(torch.backends, "tpu"):
        return "tpu"
    if hasattr(torch, "neuron"):
        return "neuron"
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    if torch.backends.mps.is_available():
        return "metal"
    if getattr(torch.version, "xpu", None) is not None:
        return "xpu"
    return "cpu"


_NAMESPACE = f"_{module}_{{_backend()}}_{uid}"

ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_NAMESPACE}}::{{op_name}}"
'''

SMOKE = """
import sys
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]
sys.exit(f"__all__ names {missing}, which the package lacks" if missing else 0)
"""


class Project:
    """What build.toml says, and where its sources are."""

    def __init__(self, root):
        Build.open(root)
        toml = tomlkit.parse((root / "build.toml").read_text(encoding="utf-8")).unwrap()
        self.root = root
        self.general = toml["general"]
        self.noarch = toml["torch-noarch"]
        self.repo_id = self.general["hub"]["repo-id"]
        self.module = self.general["name"].replace("-", "_")
        self.package = root / "torch-ext" / self.module
        if '-depends"' in json.dumps(toml):
            raise NotImplementedError("build.toml declares dependencies, which this builder does not write to metadata")

    def sources(self):
        """Relative path -> bytes of what the package ships, in the order of the paths."""
        extensions = {f".{extension}" for extension in self.noarch.get("pyext", ["py", "pyi"])}
        paths = (path for path in self.package.rglob("*") if path.is_file() and path.suffix in extensions)
        files = {path.relative_to(self.package).as_posix(): path.read_bytes() for path in paths}
        files.pop("_ops.py", None)
        return {path: files[path] for path in sorted(files)}


def parse(source, where):
    return ast.parse(source, where, feature_version=OLDEST_PYTHON)


def check_ops(tree, where):
    """Problems with the registration of operators, as strings.

    Every use of a torch.library registration has to be a call whose first argument is add_op_namespace_prefix("name"),
    so that two builds of the kernel in one process never share an operator.
    """
    origins = _import_origins(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    problems = []

    def report(node, text):
        problems.append(f"{where}:{node.lineno}: {text}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and inner.level and inner.module == "_ops":
                    report(inner, "_ops is always there: import it outside of try")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                renamed = alias.asname not in (None, alias.name)
                if node.module == "torch.library" and (renamed or alias.name == "*"):
                    report(node, f"torch.library.{alias.name} is imported under another name")
                if PREFIX in (alias.name, alias.asname) and (renamed or not node.level or node.module != "_ops"):
                    report(node, f"{PREFIX} has to be imported from ._ops under its own name")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == PREFIX:
            report(node, f"{PREFIX} is defined anew")
        elif isinstance(node, ast.arg) and node.arg == PREFIX:
            report(node, f"{PREFIX} is defined anew")
        elif isinstance(node, ast.Name) and node.id == PREFIX and not isinstance(node.ctx, ast.Load):
            report(node, f"{PREFIX} is defined anew")
        elif isinstance(node, (ast.Name, ast.Attribute)):
            origin = _dotted(node, origins)
            name = origin.removeprefix(TORCH_LIBRARY)
            if origin == TORCH_LIBRARY[:-1] and id(node) not in owners:
                report(node, "torch.library is passed on as a value")
            elif origin.startswith(TORCH_LIBRARY) and name in LIBRARIES:
                report(node, f"torch.library.{name} takes a namespace of its own")
            elif origin.startswith(TORCH_LIBRARY) and name in REGISTRATIONS:
                if not _is_prefixed(calls.get(id(node))):
                    report(node, f'the first argument of torch.library.{name} has to be {PREFIX}("...")')
            elif isinstance(node, ast.Attribute) and node.attr in REGISTRATIONS - {"define", "impl"}:
                report(node, f"use torch.library.{node.attr} with {PREFIX}, not the operator's method")
    return problems


def _import_origins(tree):
    """Local name -> dotted name of what was imported under it."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            origins.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return origins


def _dotted(node, origins):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, origins)}.{node.attr}"
    return origins.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _is_prefixed(call):
    if call is None or not call.args or not isinstance(call.args[0], ast.Call):
        return False
    prefix = call.args[0]
    names_prefix = isinstance(prefix.func, ast.Name) and prefix.func.id == PREFIX and not prefix.keywords
    return names_prefix and [type(getattr(arg, "value", None)) for arg in prefix.args] == [str]


def check_imports(tree, where):
    """Problems with imports, as strings: only the package itself, relatively, and the standard library, torch, triton.

    `where` is the path of the file in the package, which says how far up a relative import may reach.
    """
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            modules = []
            if node.level > len(PurePosixPath(where).parts):
                problems.append(f"{where}:{node.lineno}: the relative import leaves the package")
        elif isinstance(node, ast.Call) and _dotted(node.func, {}).split(".")[-1] in ("__import__", "import_module"):
            literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "a computed name"
            modules = [] if str(literal).startswith(".") else [literal]
        else:
            continue
        for module in modules:
            if module.split(".")[0] not in IMPORTABLE or module in NOT_IN_EVERY_PYTHON:
                problems.append(f"{where}:{node.lineno}: imports {module}, which is not there everywhere")
    return problems


def check_layout(project):
    """Problems with where the sources lie, as strings."""
    problems = []
    if not (project.package / "__init__.py").is_file():
        problems.append(f"torch-ext/{project.module}/__init__.py is missing")
    if (project.package / project.module).exists():
        problems.append(f"torch-ext/{project.module}/{project.module} would hide the package from older loaders")
    # The CI of the Hub puts the variant on PYTHONPATH.
    for name in sorted({path.stem for path in project.package.iterdir()} & IMPORTABLE):
        problems.append(f"torch-ext/{project.module}/{name} would hide another module of that name")
    return problems


def check_sources(project):
    """All problems with the sources of the package, as strings."""
    problems = check_layout(project)
    for path, source in project.sources().items():
        if not path.endswith(".py"):
            continue
        try:
            tree = parse(source, path)
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}: {error.msg}")
            continue
        problems += check_ops(tree, path) + check_imports(tree, path)
    return problems


def public_names(project):
    """The entries of the literal __all__, which the card and the public API check of the Hub read."""
    for node in parse((project.package / "__init__.py").read_bytes(), "__init__.py").body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            return ast.literal_eval(node.value)
    raise ValueError("__init__.py has no __all__ that is a plain list of strings")


def ops_source(module, uid):
    return OPS.format(module=module, uid=uid)


def unique_id(project):
    """Hash of everything that a variant is made from, so that different builds can live in one process."""
    files = project.sources()
    files["_ops.py"] = ops_source(project.module, "").encode()
    files["build.toml"] = (project.root / "build.toml").read_bytes()
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:7]


def write_variant(project, backend, uid, variant):
    for path, content in {**project.sources(), "_ops.py": ops_source(project.module, uid).encode()}.items():
        target = variant / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    archs = project.noarch.get("cuda_capabilities") if backend == "cuda" else None
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata = {
        "name": project.general["name"],
        "id": f"_{project.module}_{backend}_{uid}",
        "version": project.general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": project.general["license"],
        **{key: project.general[key] for key in ("upstream", "source") if key in project.general},
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def validate_variant(variant):
    """Read the variant back as `kernels` does, check every hash, and load it in a fresh process without a network."""
    metadata = Metadata.read_from_file(variant / "metadata.json")
    if not metadata.id.isidentifier():
        raise ValueError(f"{metadata.id} is no module name")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_KERNELS"}
    environment.update(HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    if subprocess.run([sys.executable, "-c", SMOKE, str(variant.resolve())], env=environment).returncode:
        raise ValueError(f"{variant.name} does not load")


def render_card(project):
    template = (project.root / "CARD.md").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        repo_id=project.repo_id,
        version=project.general["version"],
        functions=[name for name in public_names(project) if name != "layers"],
        has_benchmark=(project.root / "benchmarks" / "benchmark.py").is_file(),
        upstream=project.general.get("upstream"),
        source=project.general.get("source"),
        license=project.general["license"].lower(),
    )


def replaceable(project, out):
    """What an earlier build left in `out`; a folder that is neither empty nor a build is refused."""
    if not out.exists() or not any(out.iterdir()):
        return []
    if not any(is_build(project, path) for path in out.glob("torch-*/metadata.json")):
        raise ValueError(f"{out} is not empty and holds no build of {project.general['name']}: name another folder")
    return [path for path in [*out.glob("torch*"), out / "benchmarks", out / "CARD.md"] if path.exists()]


def is_build(project, metadata):
    return json.loads(metadata.read_text(encoding="utf-8")).get("name") == project.general["name"]


def build(root, out):
    """Build all variants into `out`, in place of what an earlier build left there; nothing changes if one fails."""
    project = Project(root)
    if problems := check_sources(project):
        raise ValueError("the sources cannot be shipped:\n" + "\n".join(problems))
    stale = replaceable(project, out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as staging:
        staging = Path(staging)
        uid = unique_id(project)
        for backend in project.general["backends"]:
            write_variant(project, backend, uid, staging / f"torch-{backend}")
            validate_variant(staging / f"torch-{backend}")
        (staging / "CARD.md").write_text(render_card(project), encoding="utf-8")
        if (root / "benchmarks").is_dir():
            bytecode = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(root / "benchmarks", staging / "benchmarks", ignore=bytecode)
        for path in stale:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for made in staging.iterdir():
            made.rename(out / made.name)
    return [out / f"torch-{backend}" for backend in project.general["backends"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="where to build (default: %(default)s)")
    for variant in build(ROOT, parser.parse_args().out.resolve()):
        print(f"{variant}  {Metadata.read_from_file(variant / 'metadata.json').id}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
